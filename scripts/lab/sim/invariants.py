"""The invariants of docs/protocol.md, as functions of a schedule's history.

Each function yields one sentence for each violation. They use only the written records, the journals and the merged files, and ask the
tested code nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from fsbarrier.program import PHASE_NAMES
from fsbarrier.protocol.facts import Generation, Join, Payload, Record
from sim.history import Done, History, Merged, RowPlace
from sim.made import i19_what_is_made_is_kept
from sim.published import no_fact_is_needed_after_its_removal, published_too_late
from sim.sessions import ended_by_an_old_start, finished, nothing_was_left, start_positions
from sim.settings import i16_the_same_settings
from sim.setup import LIMITS
from sim.verdicts import gave_up_for_a_reason, i7_no_false_death, i15_only_for_a_reason
from sim.waiting import i18_whoever_waits_goes_on
from sim.world import World

NOTHING: Payload = {}
NOBODY: Done = {}
NEVER = 0.0, None


class Violation(NamedTuple):
    """A broken invariant: its number and one sentence."""

    number: str
    what: str


def check(world: World) -> list[Violation]:
    """All violations in a finished schedule."""
    history = world.history
    found = [Violation(number, what) for number, function in ALL.items() for what in function(history)]
    found += [Violation("I3", what) for what in start_positions(history, world.rules)]
    found += [Violation("I6", what) for what in outcomes(world)]
    found += [Violation("I15", what) for what in i15_only_for_a_reason(world)]
    found += [Violation("I18", what) for what in i18_whoever_waits_goes_on(history, world.rules)]
    found += [Violation("I19", what) for what in i19_what_is_made_is_kept(history, world.rules)]
    return found


def i1_nobody_passes_early(history: History) -> Iterator[str]:
    """Nobody passes a row before every member of the generation has entered it and published "done"."""
    entered: defaultdict[RowPlace, set[int]] = defaultdict(set)
    # rows that all members had entered and finished when the first one passed
    through: dict[RowPlace, Generation] = {}
    facts = history.facts
    for event, place in history.places:
        node, generation = event.node, event.node.generation
        if event.event == "phase_started":
            entered[place].add(node.rank)
        elif through.get(place) is not generation:
            assert generation is not None
            done, there, early = facts.get(place, {}), entered[place], False
            for rank in generation.ranks:
                if rank not in done or done[rank][0] > event.time:
                    early = True
                    yield f"node {node.rank} passed {place} before node {rank} was done"
                elif rank not in there:
                    early = True
                    yield f"node {node.rank} passed {place} before node {rank} entered it"
            if not early:
                through[place] = generation


def i2_one_decision(history: History) -> Iterator[str]:
    """All processes that pass a row have read the same decision, the leader's. Later generations adopt no other."""
    # the decision that the first process read, and when it did
    read: dict[RowPlace, Payload] = {}
    times: dict[RowPlace, float] = {}
    facts = history.facts
    for event, place in history.passed:
        node, generation = event.node, event.node.generation
        assert generation is not None
        entry = node.decisions.get(PHASE_NAMES[place[2]])
        value: Payload = entry["value"] if entry is not None and entry["iteration"] == place[1] else NOTHING
        _, fact = facts.get(place, NOBODY).get(generation.leader, NEVER)
        if fact is not None and fact.value is not value and fact.value != value:
            yield f"node {node.rank} passed {place} with {value}, its leader had published {fact.value}"
        first = read.get(place)
        if first is None:
            read[place], times[place] = value, event.time
        elif first is not value and first != value:
            yield f"node {node.rank} passed {place} with {value}, others with {first}"
    yield from _adopted(history, read, times)


def _adopted(
    history: History, read: Mapping[RowPlace, Payload], times: Mapping[RowPlace, float]
) -> Iterator[str]:
    """Each generation's record contains, for each row before its start, the last decision that any node had read by then. A session with
    other phases may begin some iterations earlier."""
    latest: dict[str, tuple[int, Payload]] = {}
    for number, (write, record) in sorted(history.generations.items()):
        start = number - 1, record.start.iteration, record.start.phase
        for place in sorted(place for place in read if place[0] == number - 1 and place < start):
            if read[place] and times[place] <= write.time:
                latest[PHASE_NAMES[place[2]]] = (place[1], read[place])
        goes_on = number == 1 or history.span(record) == history.span(history.generations[number - 1][1])
        for name, (iteration, value) in latest.items() if goes_on else ():
            entry = record.decisions.get(name)
            if entry is None or (
                (entry["iteration"], entry["value"]) != (iteration, value)
                and not _published(history, number - 1, name, entry, iteration)
            ):
                yield f"generation {number} does not adopt {name} of iteration {iteration}, which was read"
        latest = {name: (entry["iteration"], entry["value"]) for name, entry in record.decisions.items()}


def _published(history: History, number: int, name: str, entry: Payload, after: int) -> bool:
    """Whether `entry` is a later decision, published by a leader that died before anybody read it."""
    place = number, entry["iteration"], PHASE_NAMES.index(name)
    previous = history.generations.get(number)
    if previous is None or entry["iteration"] <= after or not history.all_done(place, previous[1]):
        return False
    return bool(history.facts[place][previous[1].leader][1].value == entry["value"])


def i3_only_forward(history: History) -> Iterator[str]:
    """(generation, iteration, phase) only grows for each process, and a generation's number exists once."""
    last_place: dict[int, RowPlace] = {}
    for event, place in history.entered:
        before = last_place.get(event.process)
        if before is not None and place <= before:
            yield f"node {event.node.rank} went from {before} to {place}"
        last_place[event.process] = place
    first_records: dict[tuple[str, int], Record] = {}
    removals: defaultdict[str, list[float]] = defaultdict(list)
    for removed in history.removed:
        removals[removed.path].append(removed.time)
    for write in history.writes:
        # A late seal may have the name of a removed fact (fsbarrier/coordination/own_facts.py).
        life = sum(1 for time in removals.get(write.path, ()) if time <= write.time)
        first = first_records.setdefault((write.path, life), write.record)
        if first is not write.record and first != write.record:
            yield f"{write.path} was written twice with different contents"
    for number, (write, record) in history.generations.items():
        if f"gen-{number:06d}.json" not in write.path:
            yield f"{write.path} holds generation {record.number}"


def i4_nothing_old_is_merged(history: History) -> Iterator[str]:
    """A merged file contains groups of its own generation, and of older ones only groups that its generation adopted."""
    for merged in history.merges:
        adopted = {str(part.path): part for part in merged.adopted}
        for entry in merged.entries:
            if entry.generation == merged.generation:
                continue
            part = adopted.get(entry.part)
            if part is None or entry.task not in (part.tasks or ()):
                yield f"{merged.out}: task {entry.task} of generation {entry.generation} was not adopted"
    stamps = {merged.stamp: merged for merged in history.merges}
    for used in history.used:
        source, generation = stamps[used.stamp], used.node.generation
        assert generation is not None
        decided = _decided_merge(history, generation.number, source.iteration)
        # A session that only updates begins before what was merged last, and reads all that was published.
        if decided is None and history.phases_of(generation) == "update":
            decided = next((put.stamp for put in history.published if put.stamp == used.stamp), None)
        if used.stamp != decided:
            yield f"node {used.node.rank} made a batch of {source.out}, not of the merge that was decided"
    yield from published_too_late(history, stamps)


def i17_young_enough(history: History) -> Iterator[str]:
    """The groups of a merge are of the policy of its iteration; with `rollout.ahead`, of that of the iteration before at most. In flight,
    engines take it before it is published; if it is made anew then, both are of one version."""
    trained = [merged for merged in history.merges if merged.split == "train"]
    for merged in history.merges:
        policies = {merged.policy}
        if history.ahead and merged.split == "train":
            before = [
                earlier
                for earlier in trained
                if earlier.iteration == merged.iteration - 1 and earlier.time < merged.time
            ]
            policies |= {earlier.policy for earlier in before}
        for entry in merged.entries:
            same_version = entry.policy.partition(".")[0] == merged.policy.partition(".")[0]
            if entry.policy not in policies and not (history.in_flight and same_version):
                yield f"{merged.out}: task {entry.task} was rolled out by policy {entry.policy}"


def _decided_merge(history: History, number: int, iteration: int) -> int | None:
    """The stamp of an iteration's merged file, which stands for its size, by the decision in force in generation `number`."""
    row_name = "train_aggregate"
    # where the next generation started
    until: tuple[int, int] | None = None
    for older in sorted((n for n in history.generations if n <= number), reverse=True):
        record = history.generations[older][1]
        place = iteration, PHASE_NAMES.index(row_name)
        fact = history.facts.get((older, *place), {}).get(record.leader)
        if fact is not None and (until is None or place < until):
            return int(fact[1].value["bytes"])
        entry = record.decisions.get(row_name)
        while entry is not None:
            if entry["iteration"] == iteration:
                return int(entry["value"]["bytes"])
            entry = entry.get("before")
        until = record.start.iteration, record.start.phase
    return None


def i5_exactly_once(history: History) -> Iterator[str]:
    """Each assigned task is in the merged file exactly once, and an iteration assigns the right number of different tasks."""
    for merged in history.merges:
        tasks, assigned = sorted(entry.task for entry in merged.entries), _assigned(history, merged)
        if tasks != sorted(assigned):
            yield f"{merged.out} holds tasks {tasks}; assigned were {sorted(assigned)}"
        most = history.tasks[merged.split] * merged.rounds
        if len(set(assigned)) != len(assigned) or len(assigned) != most:
            yield f"{merged.out}: assigned were {sorted(assigned)} instead of {most} tasks"


def _assigned(history: History, merged: Merged) -> list[int]:
    """The tasks of a merge, by the decision in force in its generation; with refills only those of the rounds that took place."""
    name = "train_assign" if merged.split == "train" else "engine_start" if merged.final else "eval_decide"
    # The final evaluation's file has the number of the next iteration.
    iteration = merged.iteration - merged.final
    record = history.generations[merged.generation][1]
    entry = record.decisions.get(name)
    if entry is not None and entry["iteration"] == iteration:
        decision = entry["value"]
    else:
        place = merged.generation, iteration, PHASE_NAMES.index(name)
        decision = history.facts[place][record.leader][1].value
    sizes = decision.get("rounds")
    return list(decision["wanted"][: None if sizes is None else sum(sizes[: merged.rounds])])


def i6_every_wait_ends(history: History) -> Iterator[str]:
    """After the faults stop, every process ends within a bounded time."""
    yield from history.stuck


def outcomes(world: World) -> Iterator[str]:
    """Every process ends with an exit code that the faults explain, and a run that can finish finishes."""
    history, rules = world.history, world.rules
    struck = history.faults
    codes = {ended.code for ended in history.ended.values()}
    allowed: set[int | None] = {0}
    if struck & {"crash", "power"}:
        allowed |= {None}
    if struck & {"outage", "room", "busy", "slow", "pause"}:
        allowed |= {3}
    if "program" in struck:
        allowed |= {4}
    hasty = rules.limits.join_timeout_s < LIMITS.join_timeout_s
    hasty = hasty or rules.limits.last_call_s is not None
    if (struck or hasty) and (
        rules.on_node_failure != "shrink" or rules.min_nodes > 1 or rules.lacks_role(())
    ):
        allowed |= {5}
    if "unreadable" in struck:
        allowed |= {2, 3}
    if "handles" in struck:
        allowed |= {3}
    if struck & {"version", "refused", "settings", "twin"}:
        allowed |= {2}
    if 6 in codes and any(incarnation > 1 for _, incarnation in history.joins):
        allowed |= {6}
    if "leave" in struck:
        allowed |= {143}
    eras = {record.era for _, record in history.generations.values()}
    if not struck and not hasty and not history.caches and len(eras) > len(world.sessions):
        yield f"{len(eras)} eras although nothing went wrong"
    for ended in history.ended.values():
        if ended.code not in allowed:
            yield f"node {ended.rank} ended with code {ended.code} ({ended.why})"
    yield from _evaluations(world)
    yield from gave_up_for_a_reason(world)
    limits = rules.limits
    waits_s = limits.join_timeout_s if limits.last_call_s is None else limits.last_call_s
    yield from ended_by_an_old_start(history, world.sessions, 0.9 * waits_s)
    now = world.sessions[-1]
    if (
        not codes & {4, 5}
        and not struck & {"refused", "settings"}
        and history.stopped_at is None
        and not finished(history, now)
        and not nothing_was_left(history, now)
    ):
        yield "the run was not finished although nothing hinders it"


def _evaluations(world: World) -> Iterator[str]:
    """The iterations that the settings name are evaluated, and no others; and unless nothing is, the last policy of a session."""
    history, interval = world.history, world.settings.eval_interval
    evaluated = {merge.iteration for merge in history.merges if merge.split == "test"}
    last_policies = {merge.iteration - 1 for merge in history.merges if merge.final}

    def due(iteration: int) -> bool:
        return interval == 1 or (interval > 1 and iteration % interval == 1)

    trains_only = world.settings.rollout_split == "train-only"
    for merge in history.merges:
        if merge.split == "test" and (
            trains_only or not interval or not (merge.final or due(merge.iteration))
        ):
            yield f"iteration {merge.iteration} was evaluated, with an evaluation every {interval}"
    for _, (_, iteration, phase) in history.passed:
        if (
            PHASE_NAMES[phase] == "eval_rollout"
            and due(iteration)
            and not trains_only
            and iteration not in evaluated
        ):
            yield f"iteration {iteration} was not evaluated, with an evaluation every {interval}"
    for session in world.sessions if interval else ():
        if session.phases == "both" and finished(history, session) and session.until not in last_policies:
            yield f"{session} was finished and its last policy was not evaluated"


def i8_only_whole_records(history: History) -> Iterator[str]:
    """The generation that a node follows equals the record."""
    previous: Generation | None = None
    checked: set[int] = set()
    for event in history.events:
        generation = event.node.generation
        if generation is previous or generation is None or id(generation) in checked:
            continue
        previous = generation
        checked.add(id(generation))
        record = history.generations.get(generation.number)
        if record is None or record[1] != generation:
            yield f"node {event.node.rank} follows a generation {generation.number} that nobody recorded"


def i9_nothing_needed_is_removed(history: History) -> Iterator[str]:
    """No member of the newest generation needs anything that was removed."""
    for missing in history.missing:
        generation = missing.node.generation
        assert generation is not None
        if not any(
            number > generation.number and write.time <= missing.time
            for number, (write, _) in history.generations.items()
        ):
            yield f"node {missing.node.rank} needed {missing.folder}, which was gone"


def i11_no_wait_on_a_missing_name(history: History) -> Iterator[str]:
    """No name is looked up repeatedly before it exists."""
    for path, count in history.misses.items():
        if count > 3:
            yield f"{path} was opened {count} times while it did not exist"


def i14_the_same_code(history: History) -> Iterator[str]:
    """The members of a generation run the same code."""
    for number, (_, record) in history.generations.items():
        joins = [history.joins[member.rank, member.incarnation].record for member in record.members]
        codes = {join.digest for join in joins if isinstance(join, Join)}
        if len(codes) > 1:
            yield f"the members of generation {number} run {len(codes)} kinds of code"


ALL: dict[str, Callable[[History], Iterator[str]]] = {
    "I1": i1_nobody_passes_early,
    "I2": i2_one_decision,
    "I3": i3_only_forward,
    "I4": i4_nothing_old_is_merged,
    "I5": i5_exactly_once,
    "I6": i6_every_wait_ends,
    "I7": i7_no_false_death,
    "I8": i8_only_whole_records,
    "I9": i9_nothing_needed_is_removed,
    "I9 facts": no_fact_is_needed_after_its_removal,
    "I11": i11_no_wait_on_a_missing_name,
    "I14": i14_the_same_code,
    "I16": i16_the_same_settings,
    "I17": i17_young_enough,
}
