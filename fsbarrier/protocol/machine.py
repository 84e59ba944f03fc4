"""THE state machine: every transition of a node lives in this file, and nothing else does.

`step(node, view, now, rules)` looks at what this node remembers, at the facts it can see and at the time it is given, and answers
with the node's next state and the actions to perform. It does no I/O, reads no clock, draws no random number.

A node's life:
    JOINING --- a generation names my incarnation ---> RUNNING --- released from the last row, or told to end ---> ENDED
       ^                                                  |
       +---- a newer generation does not name me ---------+

In RUNNING every row of the program is a barrier, passed in four steps:
    enter row k -> do my work in it, if any -> publish my fact "done" -> released when every member's "done" is there

A row may ask for work of each member, of the leader, or of the leader once all the others are done; what it is, is never asked.
Everything unusual (a lost node, a failed program, a joining node, the end of a run) has one answer: a new generation. Its record is
created exclusively, so that whatever two nodes believe, there is one truth per number.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsbarrier.program import Phase
from fsbarrier.protocol.facts import SEALED, Fact, Generation, Join, Member, Position, Verdict
from fsbarrier.protocol.lost import found_by_others, last_news, lost_as_fields, lost_as_text
from fsbarrier.protocol.membership import Loss, live_joiners, losses, occupied
from fsbarrier.protocol.state import (
    ANNOUNCED,
    EACH,
    ENDED,
    GATHER,
    LEADER,
    NONE,
    RUNNING,
    Action,
    Announce,
    CancelWork,
    Entered,
    Exit,
    Launch,
    Node,
    Note,
    Part,
    Propose,
    Publish,
    Recover,
    Rules,
    Stage,
    Step,
    View,
    changed,
)
from fsbarrier.protocol.succession import (
    all_done,
    another_try,
    behind_the_seal,
    failed_tries,
    first_of_session,
    leaders_word,
    opening,
    successor,
    with_decision,
)


def step(node: Node, view: View, now: float, rules: Rules) -> Step:
    """One transition, or none: (the node as it is now, the actions to perform in order). The first rule that applies wins."""
    if node.stage is ENDED:
        return node, ()
    mine, newest = view.joins.get(node.rank), view.newest
    return (
        (_fenced(node, mine) if mine is not None and mine.incarnation > node.incarnation else None)
        or (_newer_generation(node, view, now, rules) if newest is not node.generation else None)
        or (_stop(node, view, now, rules) if view.stop is not None else None)
        or (_run if node.stage is RUNNING else _join)(node, view, now, rules)
        or (node, ())
    )


def _run(node: Node, view: View, now: float, rules: Rules) -> Step | None:
    """The rules of a node in a generation. What each of them needs is looked at here: most of the time nothing is there."""
    return (
        (_release(node, view, now, rules) if view.leaders_fact is not None else None)
        or (_regroup(node, view, now, rules) if rules.regroup else None)
        or (_failed_program(node, view, now, rules) if view.failed else None)
        or _lost_member(node, view, now, rules)
        or (_work(node, view, now, rules) if node.part is not ANNOUNCED else None)
    )


def _end(node: Node, code: int, state: str, reason: str) -> Step:
    return changed(node, stage=ENDED), (CancelWork(), Exit(code, state, reason))


def _fenced(node: Node, newest: Join) -> Step:
    """Another process took this rank."""
    where = f"on {newest.host}, process {newest.pid}" if newest.host else "elsewhere"
    return _end(node, 6, "left", f"node {node.rank} was started again {where}; this older one ends")


def _newer_generation(node: Node, view: View, now: float, rules: Rules) -> Step | None:
    """A newer generation exists: go with it, end with it, or rejoin."""
    newest = view.newest
    known = node.generation.number if node.generation else node.baseline
    if newest is None or newest.number <= known:
        return None
    if newest.verdict is not None:
        state = "broken" if newest.verdict.exit_code else "stopped"
        return _end(node, newest.verdict.exit_code, state, newest.verdict.reason)
    if newest.incarnation_of(node.rank) == node.incarnation:
        entered, actions = _enter_generation(node, newest, now)
        gone = found_by_others(node, newest, view, now, rules)
        told = (Note("node_lost", {"lost": lost_as_fields(gone, node, rules)}, at=node),) if gone else ()
        return entered, (*told, *actions)
    if node.stage is Stage.JOINING:
        return changed(node, baseline=newest.number), ()
    renewed = Node(node.rank, node.incarnation + 1, now, node.host, baseline=newest.number, met=True)
    note = Note("left_generation", {"newest": newest.number, "reason": newest.reason})
    return renewed, (CancelWork(), note, Announce(renewed.incarnation))


def _enter_generation(node: Node, generation: Generation, now: float) -> Step:
    entered = changed(
        node,
        stage=RUNNING,
        since=now,
        generation=generation,
        position=generation.start,
        part=NONE,
        result={},
        work_s=0.0,
        decisions=dict(generation.decisions),
        trouble_since=None,
        failed_since=None,
    )
    fields = {"members": list(generation.ranks), "leader": generation.leader, "reason": generation.reason}
    return entered, (
        CancelWork(),
        Note("generation_started", {"number": generation.number, **fields}),
        Entered(generation.start, generation, None),
    )


def _stop(node: Node, view: View, now: float, rules: Rules) -> Step | None:
    """Somebody asked the run to end: whoever sees it first, at the next start of an iteration or at once, decides it for all."""
    assert view.stop is not None
    if node.stage is Stage.JOINING:
        return _end(node, 0, "stopped", f"stopped before it began, as {view.stop.who} asked")
    generation, position = node.generation, node.position
    assert generation is not None and position is not None
    if not view.stop.now and position.phase != rules.span(generation.choices)[0]:
        return None
    when = "at once" if view.stop.now else f"before iteration {position.iteration}"
    verdict = Verdict(0, f"stopped {when}, as {view.stop.who} asked")
    return node, (Propose(successor(node, view, rules, generation.members, verdict.reason, verdict=verdict)),)


# --- RUNNING ----------------------------------------------------------------------------------------------------------------


def _gone(node: Node, view: View, now: float, rules: Rules) -> Sequence[Loss]:
    generation = node.generation
    assert generation is not None
    return losses(generation.members, node.rank, view.joins, view.ledger, node.since, now, rules.limits)


def _release(node: Node, view: View, now: float, rules: Rules) -> Step | None:
    """Every member is done with this row, and the leader's fact tells what was decided: on to the next one."""
    generation, position, fact = node.generation, node.position, view.leaders_fact
    assert generation is not None and position is not None and fact is not None
    if fact.status == SEALED:
        return _sealed(node, view, now, rules)
    if node.part is not ANNOUNCED or not view.arrived.issuperset(generation.ranks):
        return None
    row, decisions = rules.program.rows[position.phase], node.decisions
    if fact.value and not row.transient:
        decisions = with_decision(decisions, row.name, position.iteration, fact.value)
    first, last = rules.span(generation.choices)
    if position.phase < last:
        following = Position(position.iteration, position.phase + 1)
        part, actions = _begin(node, rules.program.rows[following.phase])
    elif generation.until is not None and position.iteration >= generation.until:
        ended = changed(node, stage=ENDED, decisions=decisions)
        done = f"{position.iteration} iterations are done"
        return ended, (Entered(position, generation, position), Exit(0, "finished", done))
    else:  # where an iteration starts a stop may take effect, and nodes be admitted: its work begins after that
        following = Position(position.iteration + 1, first)
        part, actions = NONE, ()
    moved = changed(
        node, position=following, part=part, result={}, work_s=0.0, decisions=decisions, trouble_since=None
    )
    return moved, (Entered(following, generation, position), *actions)


def _sealed(node: Node, view: View, now: float, rules: Rules) -> Step | None:
    """A node that joined took all members for dead and ended this generation; if it does not go on itself, those who live do."""
    if _gone(node, view, now, rules):
        return None
    return _propose_in_turn(node, behind_the_seal(node, view, rules), now, rules, ())


def _failed_program(node: Node, view: View, now: float, rules: Rules) -> Step | None:
    """A member's program failed: its attempt ends on all nodes; tried again in a new generation, or given up.

    Not before each other member was heard a beat later: programs that work together fail when a node is lost, and that is the
    loss's doing, which is answered as a loss.
    """
    generation = node.generation
    assert generation is not None
    if _gone(node, view, now, rules):
        return None
    if node.failed_since is None:
        return changed(node, failed_since=now), (CancelWork(),)
    later = node.failed_since + rules.limits.stagger_s / 2
    if not all(view.ledger.heard(m, later) for m in generation.members if m.rank != node.rank):
        return None
    return _propose_in_turn(node, another_try(node, view, rules), now, rules, ())


def _lost_member(node: Node, view: View, now: float, rules: Rules) -> Step | None:
    """A member is gone: shrink, wait for it, or end the run."""
    generation, position = node.generation, node.position
    assert generation is not None and position is not None
    gone = _gone(node, view, now, rules)
    if not gone:  # a false alarm is over
        return (changed(node, trouble_since=None), ()) if node.trouble_since is not None else None
    names = lost_as_text(gone, node, rules)
    lost_ranks = {loss.member.rank for loss in gone}
    living = tuple(m for m in generation.members if m.rank not in lost_ranks)
    verdict, members = None, living
    joiners = live_joiners(view.joins, view.ledger, now, rules.limits)
    if rules.on_node_failure == "hold":  # a group of somebody's own: the caller is told, and decides
        return None
    if rules.on_node_failure == "abort":
        verdict = Verdict(5, f"{names}; --on-node-failure abort ends the run")
    elif rules.on_node_failure == "wait":
        waited = now - (node.trouble_since if node.trouble_since is not None else now)
        if lost_ranks <= joiners.keys():
            members = tuple(joiners[m.rank] if m.rank in lost_ranks else m for m in generation.members)
        elif waited >= rules.limits.rejoin_timeout_s:
            verdict = Verdict(5, f"{names}; not back within {rules.limits.rejoin_timeout_s:g} s")
        elif node.trouble_since is None:
            return changed(node, trouble_since=now), (
                Note("node_lost", {"lost": lost_as_fields(gone, node, rules), "waiting": True}),
            )
        else:
            return None  # own work goes on; the barrier holds by itself
    elif len(living) < rules.min_nodes:
        verdict = Verdict(5, f"{names}; {len(living)} left, --min-nodes is {rules.min_nodes}")
    attempt = failed_tries(generation, position)
    proposal = successor(node, view, rules, members, names, verdict=verdict, attempt=attempt)
    return _propose_in_turn(node, proposal, now, rules, gone)


def _regroup(node: Node, view: View, now: float, rules: Rules) -> Step | None:
    """A group's caller asked for the next generation: of the living, and of those who wait to be taken in.

    A member that was started anew is given a moment to show that it lives; nobody takes turns, since only some may have asked.
    """
    generation = node.generation
    assert generation is not None
    if generation.number != rules.regroup:
        return None
    gone = _gone(node, view, now, rules)
    lost_ranks = {loss.member.rank for loss in gone}
    joiners = live_joiners(view.joins, view.ledger, now, rules.limits)
    known = {m.rank: m.incarnation for m in generation.members}
    restarted = {r for r, join in view.joins.items() if r in known and join.incarnation > known[r]}
    since = now if node.trouble_since is None else node.trouble_since
    if not restarted <= joiners.keys() and now - since < rules.limits.stagger_s:
        return (changed(node, trouble_since=since), ()) if node.trouble_since is None else None
    members = {m.rank: m for m in generation.members if m.rank not in lost_ranks}
    proposal = successor(
        node, view, rules, [*({**joiners, **members}).values()], lost_as_text(gone, node, rules) or "regroup"
    )
    return node, (Propose(proposal),)


def _propose_in_turn(
    node: Node, proposal: Generation, now: float, rules: Rules, gone: Sequence[Loss]
) -> Step | None:
    """Propose at once if this is the lowest living rank, later the more living ranks are below it.

    The order only keeps nodes from racing; the exclusive create decides whoever comes first.
    """
    assert node.generation is not None
    first = node.trouble_since is None
    since = now if node.trouble_since is None else node.trouble_since
    lost_ranks = {loss.member.rank for loss in gone}
    below = sum(1 for m in node.generation.members if m.rank < node.rank and m.rank not in lost_ranks)
    actions: list[Action] = []
    if first and gone:
        actions.append(Note("node_lost", {"lost": lost_as_fields(gone, node, rules)}))
    if now - since >= below * rules.limits.stagger_s:
        actions.append(Propose(proposal))
    if not actions:
        return None  # not this node's turn: its own work goes on meanwhile
    return changed(node, trouble_since=since), actions


def _work(node: Node, view: View, now: float, rules: Rules) -> Step | None:
    """This node's own work in its row, up to its published fact."""
    generation, position = node.generation, node.position
    assert generation is not None and position is not None
    row = rules.program.rows[position.phase]
    if node.part is NONE:
        admitted = _admit(node, view, now, rules)
        if admitted is not None:
            return admitted
        part, actions = _begin(node, row)
        return changed(node, part=part), actions
    if node.part is GATHER:
        if row.each is None or view.arrived.issuperset(set(generation.ranks) - {node.rank}):
            return changed(node, part=LEADER), (Launch(LEADER),)
        return None
    report = view.work
    if report is None or report.part is not node.part:
        return None
    if not report.ok:
        fact = Fact(node.rank, node.incarnation, "failed", report.value, report.seconds)
        return changed(node, part=ANNOUNCED), (Publish(fact),)
    result, work_s = {**node.result, **report.value}, node.work_s + report.seconds
    if node.part is EACH and row.leader is not None and generation.leader == node.rank:
        return changed(node, part=GATHER, result=result, work_s=work_s), ()
    fact = Fact(node.rank, node.incarnation, "done", result, work_s)
    return changed(node, part=ANNOUNCED, result=result, work_s=work_s), (Publish(fact),)


def _begin(node: Node, row: Phase) -> tuple[Part, Sequence[Action]]:
    """How a member's part in a row begins; where there is nothing for it to do it is done at once."""
    assert node.generation is not None
    if row.each is not None:
        return EACH, (Launch(EACH),)
    if row.leader is not None and node.generation.leader == node.rank:
        return GATHER, ()
    return ANNOUNCED, (Publish(Fact(node.rank, node.incarnation, "done")),)


def _admit(node: Node, view: View, now: float, rules: Rules) -> Step | None:
    """Start of an iteration: nodes that came back are taken in by the leader, in a new generation."""
    generation, position = node.generation, node.position
    assert generation is not None and position is not None
    first, _ = rules.span(generation.choices)
    if node.rank != generation.leader or position.phase != first or rules.on_node_failure == "hold":
        return None
    joiners = live_joiners(view.joins, view.ledger, now, rules.limits)
    new = [member for rank, member in joiners.items() if generation.incarnation_of(rank) is None]
    if not new:
        return None
    names = ", ".join(f"node {m.rank} ({m.host})" for m in sorted(new, key=lambda m: m.rank))
    proposal = successor(node, view, rules, (*generation.members, *new), f"joined: {names}")
    return node, (Propose(proposal),)


# --- JOINING ----------------------------------------------------------------------------------------------------------------


def _join(node: Node, view: View, now: float, rules: Rules) -> Step:
    """Wait to be admitted by a living generation, or form one with the others who are starting."""
    others = [m for m in view.newest.members if m.rank != node.rank] if view.newest else []
    if occupied(view.newest, node.rank, view.joins, view.ledger, node.since, now, rules.limits):
        met = node.met or any(view.ledger.moved(m) for m in others)
        return (changed(node, met=True) if met and not node.met else node), ()  # it admits this node
    if node.met and view.newest and any(view.ledger.state(m) == "finished" for m in others):
        return _nothing_to_do(node, view.newest.until)  # it came too late
    found, newest = view.recovered, view.newest.number if view.newest else 0
    if found is None or found.generation != newest or now - found.at > rules.limits.suspect_s:
        return node, (Recover(),)
    word = leaders_word(view)
    if word is not None and all_done(opening(found, rules.span(word.choices)), word.until):
        return _nothing_to_do(node, word.until)
    waited = now - node.since
    if len(view.joins) < rules.num_nodes and waited < rules.limits.join_timeout_s:
        return node, ()
    me = Member(node.rank, node.incarnation, node.host)
    live = {**live_joiners(view.joins, view.ledger, now, rules.limits), node.rank: me}
    missing = [rank for rank in range(rules.num_nodes) if rank not in live]
    if missing:
        if waited < rules.limits.join_timeout_s:
            return node, ()
        names = ", ".join(f"node {rank} ({last_news(view, rank, now)})" for rank in missing)
        if rules.on_node_failure != "shrink" or len(live) < rules.min_nodes:
            here = f"{len(live)} of {rules.num_nodes} nodes are here"
            return _end(node, 5, "left", f"waited {waited:.0f} s for {names}; {here}")
    below = sum(1 for rank in live if rank < node.rank)
    overdue = waited - (rules.limits.join_timeout_s if missing else 0.0)
    if below and overdue < below * rules.limits.stagger_s + rules.limits.dead_s:
        return node, ()
    if not found.sealed:  # an old member that lives after all must not go on from there
        return node, (Recover(for_good=True),)
    proposal = first_of_session(node, view, rules, live, found)
    if all_done(proposal.start, proposal.until):  # as far as those who came know
        return _nothing_to_do(node, proposal.until)
    return node, (Propose(proposal),)


def _nothing_to_do(node: Node, until: int | None) -> Step:
    done = f"the run has already done its {until} iterations; a larger --iterations goes on"
    return changed(node, stage=ENDED), (Exit(0, "finished", done),)
