"""The state machine: every transition of a node is in this file, and nowhere else.

`step(node, view, now, rules)` takes what this node remembers, the facts that it sees, and the time. It returns the node's next
state and the actions to perform, in order. It does no I/O, reads no clock and draws no random number.

    JOINING --- a generation names my incarnation ---> RUNNING --- released from the last row, or told to end ---> ENDED
       ^                                                  |
       +---- a newer generation does not name me ---------+

In RUNNING, every row of the program is a barrier:

    enter row k -> do my work, if any -> publish "done" -> released when every member has published "done"

A row may have work for each member, and work for the leader once all the others are done. The machine never asks what the work is.
A lost node, a failed program, a joining node, the end of a run: the answer is always a new generation. Its record is created
exclusively, so two nodes may believe different things, but there is only one record of each number.

RULES, at the end, is the whole machine: the rules of each stage in order. A rule returns None if it does not apply, and the first
rule that returns a step wins. A rule may return the unchanged node to keep the rules below it from firing. A client of the core may
hand in its own rules in place of RUN_ANSWERS, as fsbarrier/group/ does. scripts/state_diagram.py draws docs/state-machine.md from
RULES. The file is longer than others so that the machine is in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsbarrier.errors import EXIT_DONE, Fenced, ProgramFailed, TooFewNodes, UsageError
from fsbarrier.protocol.attempts import after_a_failure, failures_so_far, pause_s
from fsbarrier.protocol.facts import Fact, Generation, Member, Position, Verdict
from fsbarrier.protocol.membership import FINISHED, GONE, silent_members
from fsbarrier.protocol.rows import Row
from fsbarrier.protocol.situation import Situation, found_by_others, last_news, lost_as_fields, lost_as_text
from fsbarrier.protocol.state import (
    Action,
    Announce,
    CancelWork,
    Entered,
    Exit,
    FindResumePoint,
    Launch,
    Node,
    Note,
    Propose,
    Publish,
    RowPart,
    Rules,
    Stage,
    Step,
    View,
)
from fsbarrier.protocol.succession import (
    RENEWED,
    STARTS,
    all_done,
    first_of_session,
    lowest_start,
    start_of_session,
    successor,
    with_decision,
)
from fsbarrier.wording import counted

Rule = Callable[[Situation], Step | None]
NOTHING: Sequence[Action] = ()


def step(node: Node, view: View, now: float, rules: Rules, answers: Sequence[Rule] | None = None) -> Step:
    """One transition, or none: (the node afterwards, the actions to perform in order).

    `answers`: the caller's own rules in place of RUN_ANSWERS.
    """
    situation = Situation(node, view, now, rules)
    in_order = RULES[node.stage]
    if answers is not None and node.stage is Stage.RUNNING:
        in_order = (*BEFORE_THE_ANSWERS, *answers, *AFTER_THE_ANSWERS)
    for rule in in_order:
        if (answer := rule(situation)) is not None:
            return answer
    return node, NOTHING


# --- in any stage: what others have decided --------------------------------------------------------------------------------


def end_when_rank_is_taken(situation: Situation) -> Step | None:
    """A newer start of this rank has joined: this one ends, because two processes must not act for one rank."""
    node = situation.node
    newest = situation.view.joins.get(node.rank)
    if newest is None or newest.incarnation <= node.incarnation:
        return None
    where = f"on {newest.host}, process {newest.pid}" if newest.host else "elsewhere"
    why = f"node {node.rank} was started again {where}; this older one ends"
    return _end(situation, Fenced.exit_code, "left", why)


def end_with_the_run(situation: Situation) -> Step | None:
    """A newer generation has a verdict: the run is over for its members, and for those who wait to join them.

    A joining node that saw nobody at work belongs to a later session: a stale listing shows it the end of the one before.
    """
    newest, node = situation.newer_generation, situation.node
    if newest is None or newest.verdict is None:
        return None
    if node.stage is Stage.JOINING and not situation.named and not node.saw_others_at_work:
        return None
    state = "broken" if newest.verdict.exit_code else "stopped"
    return _end(situation, newest.verdict.exit_code, state, newest.verdict.reason)


def enter_newer_generation(situation: Situation) -> Step | None:
    """A newer generation names this incarnation: the node ends its old work and enters the row that the record names."""
    newest = situation.newer_generation
    if newest is None or newest.incarnation_of(situation.node.rank) != situation.node.incarnation:
        return None
    gone = found_by_others(situation, newest)
    lost = [Note("node_lost", {"lost": lost_as_fields(situation, gone)}, at=situation.node)] if gone else []
    entered, actions = _enter(situation, newest)
    return entered, (*lost, *actions)


def _enter(situation: Situation, generation: Generation) -> Step:
    node = situation.node
    entered = Node(
        node.rank,
        node.incarnation,
        situation.now,
        node.host,
        stage=Stage.RUNNING,
        started_as=node.started_as,
        baseline=node.baseline,
        saw_others_at_work=node.saw_others_at_work,
        generation=generation,
        position=generation.start,
        decisions=generation.decisions,
        missed_s=situation.view.ledger.missed_s,
    )
    about = {"members": list(generation.ranks), "leader": generation.leader, "reason": generation.reason}
    settings = (
        {"settings": generation.settings} if generation.settings and generation.reason in STARTS else {}
    )
    started = Note("generation_started", {"number": generation.number, **about, **settings})
    return entered, (CancelWork(), started, Entered(generation.start, generation, begins=True))


def _end(situation: Situation, code: int, state: str, reason: str) -> Step:
    return replace(situation.node, stage=Stage.ENDED), (CancelWork(), Exit(code, state, reason))


# --- JOINING: a live generation admits this node, or this node helps to form the next one ----------------------------------


def take_note_of_a_generation(situation: Situation) -> Step | None:
    """The others formed a generation without this node: it remembers the number as its `baseline`, and waits to be admitted."""
    if situation.newer_generation is None:
        return None
    return replace(situation.node, baseline=situation.newer_generation.number), NOTHING


def end_when_the_code_differs(situation: Situation) -> Step | None:
    """This node runs different code from the nodes that it would join: it ends, and they go on.

    It compares itself with the live members of the newest generation. If a session is about to begin, it compares itself with the
    lower ranks that wait, since the run follows the lowest. The others do not admit this node either (`Situation.joiners`).
    """
    view, other = situation.view, None
    for member in situation.others:
        join = view.joins.get(member.rank)
        if join is not None and join.incarnation == member.incarnation and view.ledger.moved(member):
            other = join if situation.differs(join) and view.ledger.state(member) not in GONE else other
    lower = (
        join
        for rank, join in sorted(situation.waiting.items())
        if rank < situation.node.rank and situation.differs(join)
    )
    other = other or next(lower, None)
    own = view.joins.get(situation.node.rank)
    if other is None or own is None:
        return None
    theirs, ours = (f"{join.version} (code {join.digest[:12]})" for join in (other, own))
    what_differs = ", ".join(own.other_code(other))
    return _end(
        situation,
        UsageError.exit_code,
        "left",
        f"node {own.rank} on {own.host} runs fsbarrier {ours}, node {other.rank} on {other.host} runs {theirs}"
        f"{f' (what differs: {what_differs})' if what_differs else ''}; start all nodes with the same fsbarrier and program",
    )


def end_when_it_does_not_fit(situation: Situation) -> Step | None:
    """The session's settings contradict this node's command line, or have no place for its rank: it ends.

    The session's settings are known once a generation names this node, this node sees members at work, or node 0 is present. Until then
    node 0 may come and ask for the same settings, or for more nodes.
    """
    known = situation.named or situation.others_at_work or situation.master_comes
    return end_when_nobody_asks_for_the_same(situation) if known else None


def end_when_nobody_asks_for_the_same(situation: Situation) -> Step | None:
    """The waiting is over, and node 0 did not ask for what this node's command line says: the node ends."""
    own = situation.view.joins.get(situation.node.rank)
    objection = situation.objection(own) if own is not None else ""
    if not objection:
        return None
    how = (
        "a setting changes when all nodes are stopped and started again, node 0 (--master) with the new value"
    )
    return _end(situation, UsageError.exit_code, "left", f"node {situation.node.rank}: {objection}; {how}")


def stop_before_the_start(situation: Situation) -> Step | None:
    """An operator asked the run to stop while this node waits to join it: end."""
    stop = situation.view.stop
    if stop is None:
        return None
    return _end(situation, EXIT_DONE, "stopped", f"stopped before it began, as {stop.who} asked")


def get_ready(situation: Situation) -> Step | None:
    """The others go on without this node: before it asks them to admit it, it does the work that makes a node ready.

    Example: a node is back, and needs a minute to start its engine. Without this rule all would wait for it in the next rollout. If nobody
    is at work, or the others wait for this node, it stops that work and asks at once. A failure counts only once it is a member.
    """
    node, newest, index = situation.node, situation.view.newest, situation.rules.table.ready
    if index is None or newest is None or node.part is RowPart.ANNOUNCED:
        return None
    if not situation.occupied or situation.halted:
        return (replace(node, part=RowPart.NONE), (CancelWork(),)) if node.part is not RowPart.NONE else None
    if node.part is RowPart.EACH:
        return (replace(node, part=RowPart.ANNOUNCED), NOTHING) if situation.view.work is not None else None
    if newest.incarnation_of(node.rank) is not None:
        # The next generation is about to go on without this rank.
        return (replace(node, part=RowPart.GATHER), NOTHING) if node.part is RowPart.NONE else None
    # The node has no decisions here, so it works with what the run began with: older results may be removed.
    members = (*newest.members, Member(node.rank, node.incarnation, node.host))
    generation = replace(newest, members=tuple(sorted(members, key=lambda m: m.rank)))
    member = replace(node, generation=generation, position=Position(newest.start.iteration, index))
    return replace(node, part=RowPart.EACH), (Launch(RowPart.EACH, at=member),)


def wait_to_be_admitted(situation: Situation) -> Step | None:
    """A member of the newest generation may be alive: that generation goes on, and admits this node when an iteration starts."""
    node, view = situation.node, situation.view
    if not situation.occupied:
        return None
    if not node.saw_others_at_work and any(view.ledger.moved(member) for member in situation.others):
        node = replace(node, saw_others_at_work=True)
    return node, NOTHING


def end_when_too_late(situation: Situation) -> Step | None:
    """The generation that this node waited for, and saw at work, has finished the run: it came too late."""
    if not situation.node.saw_others_at_work or situation.view.newest is None:
        return None
    finished = any(situation.view.ledger.state(member) == FINISHED for member in situation.others)
    return _end_with_nothing_to_do(situation, situation.view.newest.until) if finished else None


def look_where_the_run_was_left(situation: Situation) -> Step | None:
    """No member is alive: the node reads from the newest generation's facts where the run stopped, again after `suspect_s`."""
    view, limits = situation.view, situation.rules.limits
    point, newest = view.resume_point, view.newest.number if view.newest is not None else 0
    if point is not None and point.generation == newest and situation.now - point.at <= limits.suspect_s:
        return None
    return situation.node, (FindResumePoint(),)


def restart_the_last_call(situation: Situation) -> Step | None:
    """If the run may begin with fewer nodes than it has places, each arrival restarts the last call (`last_call_s`)."""
    here = len(situation.starting)
    if situation.rules.limits.last_call_s is None or situation.node.starting_nodes == here:
        return None
    return replace(situation.node, starting_nodes=here, starting_since=situation.now), NOTHING


def end_when_all_is_done(situation: Situation) -> Step | None:
    """The run has already done all the iterations that were asked for, so the node ends. It first stays for up to `dead_s`, so that nodes
    that are started with it see it and draw the same conclusion instead of waiting for it."""
    lowest, point, rules = lowest_start(situation), situation.view.resume_point, situation.rules
    if lowest is None or point is None:
        return None
    start = start_of_session(point, rules.span(lowest.choices), rules.table, lowest.until)
    if not all_done(start, lowest.until):
        return None
    stays = situation.waits_for_nodes and situation.waited_s < rules.limits.dead_s
    return (situation.node, NOTHING) if stays else _end_with_nothing_to_do(situation, lowest.until)


def wait_for_all_nodes(situation: Situation) -> Step | None:
    """Nodes are missing, and there is still time: wait."""
    return (situation.node, NOTHING) if situation.waits_for_nodes else None


def awaited(node: Node, view: View, now: float, rules: Rules) -> Sequence[int]:
    """The missing ranks that a joining node waits for; none if it waits for anything else."""
    situation = Situation(node, view, now, rules)
    answers = next((rule for rule in RULES[node.stage] if rule(situation) is not None), None)
    last_call = rules.limits.last_call_s is not None and situation.enough
    return situation.missing if answers is wait_for_all_nodes and not last_call else ()


def give_up_waiting(situation: Situation) -> Step | None:
    """Nodes are missing after the timeout, and the run may not begin without them: end."""
    rules = situation.rules
    elastic = rules.on_node_failure == "shrink" or rules.limits.last_call_s is not None
    if not situation.missing or (elastic and situation.enough):
        return None
    names = ", ".join(f"node {rank} ({last_news(situation, rank)})" for rank in situation.missing)
    here = f"{len(situation.starting)} of {counted(rules.num_nodes, 'node')} are here"
    why = f"waited {situation.waited_s:.0f} s for {names}; {here}"
    return _end(situation, TooFewNodes.exit_code, "left", why)


def let_lower_ranks_go_first(situation: Situation) -> Step | None:
    """The lowest rank present forms the generation; a higher rank does so only after a timeout.

    Otherwise 64 nodes that start together would all read the old facts and race for one record. If node 0 hangs, node 1 takes
    over. Safety does not depend on the order, since only one node can create the record.
    """
    limits = situation.rules.limits
    below = sum(1 for rank in situation.starting if rank < situation.node.rank)
    overdue_s = situation.overdue_s if situation.missing else situation.waited_s
    wait = below and overdue_s < below * limits.stagger_s + limits.dead_s
    return (situation.node, NOTHING) if wait else None


def seal_the_old_generation(situation: Situation) -> Step | None:
    """Fence the old generation with a seal before the run goes on without it, so that none of its members can pass a row any more.

    Its members look dead from here, but may be at work. Example: this node's listing of beats/ is 20 s stale. It would start the
    next generation in row 7 while the old members pass row 7 with a different decision. coordination/resume.py explains the seal.
    """
    point = situation.view.resume_point
    return None if point is None or point.sealed else (situation.node, (FindResumePoint(seal=True),))


def form_a_generation(situation: Situation) -> Step | None:
    """Propose who takes part and where the run resumes. The node that creates the record first decides for all."""
    # `look_where_the_run_was_left` has run.
    assert situation.view.resume_point is not None
    return situation.node, (Propose(first_of_session(situation, situation.view.resume_point)),)


def _end_with_nothing_to_do(situation: Situation, until: int | None) -> Step:
    assert until is not None
    done = f"the run has already done its {counted(until, 'iteration')}; a larger --iterations goes on"
    return replace(situation.node, stage=Stage.ENDED), (Exit(EXIT_DONE, FINISHED, done),)


# --- RUNNING: the generation changes ---------------------------------------------------------------------------------------


def leave_when_dismissed(situation: Situation) -> Step | None:
    """The others go on without this node, because its program failed in each attempt and theirs did not: it ends and says why."""
    newest, node = situation.newer_generation, situation.node
    if newest is None or Member(node.rank, node.incarnation, node.host) not in newest.dismissed:
        return None
    fact = situation.view.failed.get(node.rank)
    value = fact.value if fact is not None else {}
    log = "".join(f"\n  | {line}" for line in value.get("log", ()))
    return _end(situation, value.get("exit_code", ProgramFailed.exit_code), "left", f"{newest.reason}{log}")


def rejoin_when_left_behind(situation: Situation) -> Step | None:
    """The others went on without this node: it ends its work and joins again as its next incarnation."""
    newest, node = situation.newer_generation, situation.node
    if newest is None:
        return None
    renewed = Node(
        node.rank,
        node.incarnation + 1,
        situation.now,
        node.host,
        started_as=node.started_as,
        baseline=newest.number,
        saw_others_at_work=True,
        missed_s=situation.view.ledger.missed_s,
        # Its engine still runs, so it is ready at once.
        part=RowPart.ANNOUNCED,
    )
    left = Note("left_generation", {"newest": newest.number, "reason": newest.reason})
    return renewed, (CancelWork(), left, Announce(renewed.incarnation))


def stop_when_asked(situation: Situation) -> Step | None:
    """An operator asked the run to stop: the first node that sees the request at a safe point ends the run for all nodes.

    The safe point is the first row of an iteration: a stop in the middle of `update` would lose that training. A request with `now`
    stops in any row. So does any request while the members wait for lost ones, since the iteration cannot end without them.
    """
    stop, iteration = situation.view.stop, situation.position.iteration
    if stop is None:
        return None
    if stop.now:
        when = "at once"
    elif situation.position.phase == situation.span[0]:
        when = f"before iteration {iteration}"
    elif situation.answers_a_loss and situation.halted:
        lost = ", ".join(f"node {loss.member.rank}" for loss in situation.gone)
        when = f"in iteration {iteration}, which waits for {lost}"
    else:
        return None
    verdict = Verdict(EXIT_DONE, f"stopped {when}, as {stop.who} asked")
    proposal = successor(situation, situation.generation.members, verdict.reason, verdict=verdict)
    return situation.node, (Propose(proposal),)


def go_on_behind_a_seal(situation: Situation) -> Step | None:
    """A starting node believed all members dead and sealed this generation: if it forms no new one, the living members do.

    The seal has the name of the leader's fact about this row, so nobody can pass the row any more (coordination/resume.py).
    """
    seal = situation.seal
    if seal is None or situation.gone or situation.result_is_coming:
        return None
    if situation.node.trouble_since is None:
        return replace(situation.node, trouble_since=situation.now), NOTHING
    why = f"node {seal.rank} ended the one before"
    failures = failures_so_far(situation.generation, situation.position)
    proposal = successor(situation, situation.generation.members, why, failures=failures)
    return _propose_in_turn(situation, proposal, situation.node.trouble_since)


def release(situation: Situation) -> Step | None:
    """Every member is done with this row, and the leader's fact is readable: go on to the next row."""
    fact = situation.view.leaders_fact
    if fact is None or situation.seal is not None or situation.node.part is not RowPart.ANNOUNCED:
        return None
    generation, position = situation.generation, situation.position
    if not situation.view.arrived.issuperset(generation.ranks):
        return None
    node, (first_row, last_row) = situation.node, situation.span
    if fact.value:
        decisions = with_decision(node.decisions, situation.row.name, position.iteration, fact.value)
        node = replace(node, decisions=decisions)
    passed: tuple[Action, ...] = (Note("phase_finished", at=node),)
    if position.phase == last_row:
        passed = (*passed, Note("iteration_finished", at=node))
    if position.phase == last_row and generation.until is not None and position.iteration >= generation.until:
        are = "is" if position.iteration == 1 else "are"
        done = f"{counted(position.iteration, 'iteration')} {are} done"
        return replace(node, stage=Stage.ENDED), (*passed, Exit(EXIT_DONE, FINISHED, done))
    if position.phase < last_row:
        following = Position(position.iteration, position.phase + 1)
        part, actions = _begin(situation, situation.rules.row(following, generation))
    else:
        # The first row of an iteration does not begin yet: a stop may take effect there, and the leader may admit nodes.
        following = Position(position.iteration + 1, first_row)
        part, actions = RowPart.NONE, NOTHING
    moved = replace(
        node, position=following, part=part, result={}, work_s=0.0, trouble_since=None, told_lost=frozenset()
    )
    return moved, (*passed, Entered(following, generation), *actions)


def end_work_after_a_failure(situation: Situation) -> Step | None:
    """A member's program failed, so this attempt is over on all nodes: cancel this node's work. If the failed member is none of those who
    make the row's result (`Row.made_by`), their work is finished first."""
    failed, node = situation.view.failed, situation.node
    if not failed or node.failed_since is not None or situation.gone or situation.result_is_coming:
        return None
    return replace(situation.node, failed_since=situation.now), (CancelWork(),)


def try_again_after_a_failure(situation: Situation) -> Step | None:
    """Retry in a new generation after a pause, or go on without the nodes whose programs cannot work, or give up (attempts.py).

    First wait for a later heartbeat of each other member. Example: node 2 dies, and torchrun therefore fails on nodes 0 and 1. That
    is a lost node, and must not count as a failed program.
    """
    node, ledger = situation.node, situation.view.ledger
    if not situation.view.failed or node.failed_since is None or situation.gone:
        return None
    later = node.failed_since + situation.rules.limits.stagger_s / 2
    if not all(ledger.heard(m, later) for m in situation.generation.members if m.rank != node.rank):
        return None
    proposal = after_a_failure(situation)
    retries = proposal.verdict is None and not proposal.dismissed
    pause = pause_s(situation, proposal.attempt) if retries else 0.0
    return _propose_in_turn(situation, proposal, node.failed_since + pause)


def forget_a_false_alarm(situation: Situation) -> Step | None:
    """A member that seemed lost has a new heartbeat: carry on."""
    if situation.node.trouble_since is None or situation.gone or situation.seal is not None:
        return None
    return replace(situation.node, trouble_since=None, told_lost=frozenset()), NOTHING


def log_losses(situation: Situation) -> Step | None:
    """Members are lost: the journal names them, before another rule answers the loss.

    If the lost members do not make this row's result, or were done with it, the others form a new generation only once the result is
    there. Example: a node that rolls out ahead dies while other nodes train; they train to the end, and the next generation publishes
    what they have made.
    """
    node = situation.node
    new = [loss for loss in situation.gone if loss.member not in node.told_lost]
    if not new:
        return None
    fields: dict[str, object] = {"lost": lost_as_fields(situation, new)}
    if situation.rules.on_node_failure != "abort" and situation.result_is_coming:
        fields["finishing"] = True
    elif situation.halted and not situation.comeback:
        fields["waiting"] = True
    told = frozenset(loss.member for loss in situation.gone)
    return replace(node, told_lost=told, trouble_since=situation.trouble_since), (Note("node_lost", fields),)


def abort_after_a_loss(situation: Situation) -> Step | None:
    """A member is lost, and with `--on-node-failure abort` that ends the run."""
    if situation.rules.on_node_failure != "abort" or not situation.gone:
        return None
    why = f"{lost_as_text(situation, situation.gone)}; --on-node-failure abort ends the run"
    return _answer_the_loss(situation, situation.living, Verdict(TooFewNodes.exit_code, why))


def wait_for_the_lost(situation: Situation) -> Step | None:
    """A member is lost: with `--on-node-failure wait` the others wait until it is back, and if too few nodes hold a role, until joining
    nodes hold it."""
    if not situation.answers_a_loss or not situation.halted:
        return None
    if situation.comeback:
        return _answer_the_loss(situation, situation.comeback)
    if situation.now - situation.trouble_since < situation.rules.limits.rejoin_timeout_s:
        return None
    lacking = situation.rules.lacks_role([member.rank for member in situation.living])
    late = f"not back within {situation.rules.limits.rejoin_timeout_s:g} s"
    why = "; ".join(filter(None, (lost_as_text(situation, situation.gone), lacking, late)))
    return _answer_the_loss(situation, situation.living, Verdict(TooFewNodes.exit_code, why))


def shrink_after_a_loss(situation: Situation) -> Step | None:
    """A member is lost, and the run goes on with the others if at least `--min-nodes` are left."""
    if situation.rules.on_node_failure != "shrink" or not situation.answers_a_loss or situation.halted:
        return None
    lacking = situation.rules.lacks([member.rank for member in situation.living])
    why = f"{lost_as_text(situation, situation.gone)}; {lacking}"
    verdict = Verdict(TooFewNodes.exit_code, why) if lacking else None
    return _answer_the_loss(situation, situation.living, verdict)


def _answer_the_loss(
    situation: Situation, members: Sequence[Member], verdict: Verdict | None = None
) -> Step | None:
    """Propose that the run goes on with `members`, or ends with `verdict`."""
    reason = lost_as_text(situation, situation.gone)
    failures = failures_so_far(situation.generation, situation.position)
    proposal = successor(situation, members, reason, verdict=verdict, failures=failures)
    return _propose_in_turn(situation, proposal, situation.trouble_since)


def _propose_in_turn(situation: Situation, proposal: Generation, since: float) -> Step | None:
    """Propose if it is this node's turn: `stagger_s` after `since` for each living rank below it. Returns None before that, so that the
    node's work goes on.

    Example: node 3 dies, and nodes 0, 1 and 2 notice it in the same second. Node 0 proposes at once, and the others see its
    generation before their turn. If node 0 hangs, node 1 proposes. Safety does not depend on the order, since only one node can
    create the record.
    """
    below = sum(1 for member in situation.living if member.rank < situation.node.rank)
    if situation.now - since < below * situation.rules.limits.stagger_s:
        return None
    return situation.node, (Propose(proposal),)


# --- RUNNING: this node's own work in its row, up to its published fact ----------------------------------------------------


def admit_joiners(situation: Situation) -> Step | None:
    """At the start of an iteration, before any work, the leader admits the nodes that wait, in a new generation."""
    if not _may_renew(situation):
        return None
    generation, joiners = situation.generation, situation.joiners
    new = [joiners[rank] for rank in sorted(joiners) if generation.incarnation_of(rank) is None]
    if not new:
        return None
    names = ", ".join(f"node {member.rank} ({member.host})" for member in new)
    proposal = successor(situation, (*generation.members, *new), f"joined: {names}")
    return situation.node, (Propose(proposal),)


def renew_a_long_generation(situation: Situation) -> Step | None:
    """A generation has lasted long enough: the leader begins the next one with the same members, so that old facts can be removed."""
    generation, position = situation.generation, situation.position
    if not _may_renew(situation) or position.iteration < generation.start.iteration + situation.rules.longest:
        return None
    reason = f"{RENEWED}{counted(situation.rules.longest, 'iteration')}"
    return situation.node, (Propose(successor(situation, generation.members, reason, era=generation.era)),)


def _may_renew(situation: Situation) -> bool:
    """Whether this node leads and is at the start of an iteration, where no work is lost by a new generation."""
    begins = situation.node.part is RowPart.NONE and situation.position.phase == situation.span[0]
    return begins and situation.leads


def begin_the_row(situation: Situation) -> Step | None:
    """This node has entered a row: its work begins, or it publishes "done" if it has none."""
    if situation.node.part is not RowPart.NONE:
        return None
    part, actions = _begin(situation, situation.row)
    return replace(situation.node, part=part), actions


def begin_the_leaders_work(situation: Situation) -> Step | None:
    """The leader's own work begins, once all other members are done with theirs."""
    node = situation.node
    if node.part is not RowPart.GATHER:
        return None
    others = set(situation.generation.ranks) - {node.rank}
    if situation.row.each is not None and not situation.view.arrived.issuperset(others):
        return None
    return replace(node, part=RowPart.LEADER), (Launch(RowPart.LEADER),)


def publish_failure(situation: Situation) -> Step | None:
    """This node's program failed: publish "failed", and wait for the next generation."""
    node, report = situation.node, situation.view.work
    if report is None or report.part is not node.part or report.ok:
        return None
    fact = Fact(node.rank, node.incarnation, "failed", report.value, report.seconds)
    return replace(node, part=RowPart.ANNOUNCED), (Publish(fact),)


def finish_the_work(situation: Situation) -> Step | None:
    """This node's work has succeeded: publish "done". In a row with work for the leader, the leader first waits for the other members."""
    node, report = situation.node, situation.view.work
    if report is None or report.part is not node.part or not report.ok:
        return None
    result, work_s = {**node.result, **report.value}, node.work_s + report.seconds
    if report.part is RowPart.EACH and situation.row.leader is not None and situation.leads:
        return replace(node, part=RowPart.GATHER, result=result, work_s=work_s), NOTHING
    fact = Fact(node.rank, node.incarnation, "done", result, work_s)
    return replace(node, part=RowPart.ANNOUNCED, result=result, work_s=work_s), (Publish(fact),)


def _begin(situation: Situation, row: Row[object]) -> tuple[RowPart, Sequence[Action]]:
    """The part of a row with which a member begins, and its actions."""
    if row.each is not None:
        return RowPart.EACH, (Launch(RowPart.EACH),)
    if row.leader is not None and situation.leads:
        return RowPart.GATHER, NOTHING
    return RowPart.ANNOUNCED, (Publish(Fact(situation.node.rank, situation.node.incarnation, "done")),)


# --- RUNNING: lines for the journal about silent members -----------------------------------------------------------------------


def log_suspicions(situation: Situation) -> Step | None:
    """Members have been silent for `suspect_s`, or are heard again: write that to the journal. Other rules decide whether one is lost."""
    node, ledger, suspected_before = situation.node, situation.view.ledger, situation.node.suspected
    since, suspect_s = node.watches_since(ledger), situation.rules.limits.suspect_s
    silent = silent_members(situation.generation.members, node.rank, ledger, since, suspect_s)
    ended = {member for member in silent if ledger.state(member) in (FINISHED, "stopped")}
    suspected = frozenset(silent) - (ended - suspected_before)
    if suspected == suspected_before:
        return None
    notes = [
        Note("node_suspected", {**_named(member), "silent_s": round(silent[member], 3)})
        if member in suspected
        else Note("node_recovered", _named(member))
        for member in situation.generation.members
        if member in suspected ^ suspected_before
    ]
    return replace(node, suspected=suspected), notes


def _named(suspect: Member) -> dict[str, object]:
    return {"suspect": suspect.rank, "host": suspect.host}


# --- the table -------------------------------------------------------------------------------------------------------------

DECIDED_BY_OTHERS: tuple[Rule, ...] = (
    end_when_rank_is_taken,
    end_with_the_run,
    enter_newer_generation,
)

#: how the members of a run answer a loss, a failed program and a joining node; the callers of a group have answers of their own
RUN_ANSWERS: tuple[Rule, ...] = (
    end_work_after_a_failure,
    try_again_after_a_failure,
    forget_a_false_alarm,
    log_losses,
    abort_after_a_loss,
    wait_for_the_lost,
    shrink_after_a_loss,
    admit_joiners,
    renew_a_long_generation,
)


BEFORE_THE_ANSWERS: tuple[Rule, ...] = (
    *DECIDED_BY_OTHERS,
    leave_when_dismissed,
    rejoin_when_left_behind,
    stop_when_asked,
    go_on_behind_a_seal,
    release,
)
AFTER_THE_ANSWERS: tuple[Rule, ...] = (
    begin_the_row,
    begin_the_leaders_work,
    publish_failure,
    finish_the_work,
    log_suspicions,
)
#: the rules of each stage; the first that applies wins
RULES: dict[Stage, tuple[Rule, ...]] = {
    Stage.JOINING: (
        end_when_it_does_not_fit,
        *DECIDED_BY_OTHERS,
        take_note_of_a_generation,
        end_when_the_code_differs,
        stop_before_the_start,
        get_ready,
        wait_to_be_admitted,
        end_when_too_late,
        look_where_the_run_was_left,
        restart_the_last_call,
        end_when_all_is_done,
        wait_for_all_nodes,
        give_up_waiting,
        end_when_nobody_asks_for_the_same,
        let_lower_ranks_go_first,
        seal_the_old_generation,
        form_a_generation,
    ),
    Stage.RUNNING: (*BEFORE_THE_ANSWERS, *RUN_ANSWERS, *AFTER_THE_ANSWERS),
    Stage.ENDED: (),
}
