"""A node that does nothing, and remembers what a row has asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsbarrier.cli.start.dryrun import DescribingNode
from fsbarrier.decisions import JsonRecord
from fsbarrier.node import Weights
from fsbarrier.specs import Launch, PolicyEngine


@dataclass(frozen=True)
class RecordingNode(DescribingNode):
    specs: list[Any] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    served: list[Weights] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def event(self, name: str, *fields: JsonRecord | Mapping[str, object]) -> None:
        line: dict[str, Any] = {}
        for some in fields:
            line |= some.as_json() if isinstance(some, JsonRecord) else some
        self.events.append({**line, "event": name})

    def run(self, spec: Any, launch: Launch | None = None, **more: Any) -> Any:
        self.specs.append(spec)
        self.launches.append(launch or spec.launch)
        return spec.report_type()()

    def command(self, launch: Launch, spec: Any = ()) -> None:
        self.specs.append(spec)
        self.launches.append(launch)

    def serve(self, weights: Weights) -> tuple[PolicyEngine, ...]:
        self.served.append(weights)
        return ()
