"""The deliberate faults of mutant_faults.py and mutant_work.py, and what shows each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mutant_faults as faults
import mutant_records as records
import mutant_work as work

from fsbarrier.protocol.membership import Limits
from fsbarrier.sim.setup import Setup

#: nobody lets anybody go first
RACING = Limits(stagger_s=0.0, join_timeout_s=60.0, rejoin_timeout_s=40.0)


@dataclass(frozen=True)
class Mutant:
    """One fault: how it is put in, and what shows it: schedules under `mix`, a story of tests/scenarios, or the count of operations.

    `breaks`: one of these invariants is seen to fail ("error": the code under test raises).
    """

    put_in: Callable[[faults.Patch], None]
    breaks: str
    mix: str = "none"
    iterations: int = 1
    seeds: int = 300
    limits: Limits = Setup().limits
    story: str = ""
    counted: bool = False

    @property
    def name(self) -> str:
        return self.put_in.__name__.replace("_", " ")

    @property
    def fault(self) -> str:
        return str(self.put_in.__doc__).strip()


MUTANTS = [
    Mutant(faults.count_instead_of_set, "I1", "crash,pause"),
    Mutant(faults.decision_from_ones_own_copy, "I2"),
    Mutant(faults.leader_by_rank_alone, "I6", "crash"),
    Mutant(faults.release_without_decision, "I2", "garbled,stale", seeds=1500),
    Mutant(faults.trust_any_bytes, "I2 I4 error", "garbled,stale", seeds=1500),
    Mutant(faults.decision_not_flushed, "I2 I6", "power"),
    Mutant(faults.delete_to_reset, "I1 I6"),
    Mutant(faults.wait_on_a_missing_name, "I11", "stale"),
    Mutant(faults.read_everybodys_fact, "I12", counted=True),
    Mutant(faults.no_exclusive_create, "I3 I8", "crash,stale", limits=RACING),
    Mutant(faults.stay_in_old_generation, "I2 I3 I6", "pause,crash"),
    Mutant(faults.no_incarnation_check, "I1 I2 I3 I4 I6 error", "twin,crash"),
    Mutant(faults.adopt_nothing, "I2 I6 error", "crash"),
    Mutant(faults.go_on_in_the_row_under_way, "I3 I6 error", "crash"),
    Mutant(faults.generation_not_flushed, "I3 I6 I8", "power"),
    Mutant(faults.recover_from_start, "I2 I3", "power,crash"),
    Mutant(faults.restart_without_a_seal, "I3", story="restarted_while_it_goes_on"),
    Mutant(faults.unreadable_is_absent, "I2 I3", "garbled,power"),
    Mutant(records.unreadable_generation_is_none, "I2 I3", story="unreadable_generation"),
    Mutant(records.wait_for_ever_for_what_cannot_be_read, "I6", story="one_host_cannot_read"),
    Mutant(records.any_code_is_admitted, "I14", "version"),
    Mutant(faults.error_is_an_empty_listing, "I2 I3 I6 I7 error", "power,crash,errors,outage", seeds=1500),
    Mutant(faults.forget_on_error, "I1 I6", "errors,lost,outage"),
    Mutant(faults.never_dead, "I6", "crash"),
    Mutant(faults.dead_when_suspected, "I7", "pause,crash"),
    Mutant(faults.own_pause_is_their_silence, "I7", "pause,slow", seeds=600),
    Mutant(faults.nobody_watches_the_watchers, "I6", "crash", seeds=1500),
    Mutant(faults.unwatched_is_silent, "I7"),
    Mutant(faults.judged_by_older_looks, "I7", story="silent_before_the_generation"),
    Mutant(faults.clocks_compared, "I7 I6"),
    Mutant(faults.one_heartbeat_file_a_rank, "I7", "twin,stale", seeds=1500),
    Mutant(faults.a_failure_moves_nobody, "I6", "program"),
    Mutant(work.merge_whatever_is_there, "I4", "crash,program"),
    Mutant(work.no_generation_at_the_merge, "I4", story="zombie_wakes_after_fencing"),
    Mutant(work.stale_knowledge_trusted_for_absence, "I4", "pause,stale"),
    Mutant(work.adopt_any_policy, "I4", "crash,program", iterations=2),
    Mutant(work.a_task_is_not_shared_out, "I5"),
    Mutant(work.merge_all_that_parts_hold, "I5", "crash,stale,program", seeds=1500),
    Mutant(work.a_task_too_few, "I5 I6 error"),
    Mutant(work.keep_one_checkpoint, "I6 I9", "crash,pause", iterations=2),
]
