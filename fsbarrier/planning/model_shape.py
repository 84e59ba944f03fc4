"""Finds the dimensions of a model that determine its memory use, measured on the model that transformers makes of its configuration.

The model is made without memory for its weights, in a process of its own (training/architecture.py), so this imports no libraries.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from fsbarrier.engine.model import text_config
from fsbarrier.errors import UsageError
from fsbarrier.processes.supervisor import own_program, with_this_package
from fsbarrier.settings.sections import LoraSettings
from fsbarrier.store import reading

# Time limit for importing PyTorch and transformers on a busy machine, and making a large model.
MAKING_S = 300.0
_NEEDED = ("hidden_size", "num_hidden_layers", "vocab_size")
#: configurations of published models, for plans without a folder
SIZES = Path(__file__).with_name("sizes.json")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. `attention`: the width of all `heads`; `width`: the activations of one token in one layer's forward pass.

    `cached`: the elements of the engine's cache per token and layer, over at most `key_value_heads` of its accelerators.
    `block`: the parameters of the largest layer. `trained`: the parameters that have gradients if none are frozen: all, or those of
    adapters. `vision`: the parameters of the vision encoder. `head`: those of an output head that is not tied to the embedding.
    `blind`: why a vision model cannot be given images here; empty if it can.
    """

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    attention: int
    width: int
    cached: int
    vocabulary: int
    block: int
    parameters: int
    trained: int
    vision: int = 0
    head: int = 0
    blind: str = ""

    @property
    def as_critic(self) -> ModelShape:
        """The shape of a critic that begins as this model: it has a head with one output, and is trained as a whole."""
        parameters = self.parameters - self.head + self.hidden + 1
        return replace(self, parameters=parameters, trained=parameters)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def largest_unit(self) -> int:
        """The most parameters that a sharded update gathers at once: a layer, the embedding or the head."""
        return max(self.block, self.embedding)

    @classmethod
    def of_folder(cls, folder: Path, lora: LoraSettings) -> ModelShape:
        """The shape of the model in a folder, whose weights may be missing. Takes some seconds. Raises UsageError."""
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} has no config.json; give a Hugging Face model folder")
        text = text_config(reading.json_object(folder / "config.json", UsageError))
        # For a missing size, transformers would take that of the family's first model.
        if missing := [name for name in _NEEDED if name not in text]:
            raise UsageError(f"{folder / 'config.json'} lacks {', '.join(missing)}")
        if importlib.util.find_spec("torch") is None:
            raise UsageError(
                "a plan needs PyTorch and transformers, which this environment lacks: in a clone start ./run.sh once without --dry-run or "
                "--help, elsewhere pip install 'fsbarrier[rl,cpu]'"
            )
        return examine(folder, lora)

    @classmethod
    def of_name(cls, name: str, lora: LoraSettings) -> ModelShape | None:
        """The shape of the published model of this name in sizes.json; None if it is not there. Raises UsageError."""
        config = json.loads(SIZES.read_text(encoding="utf-8")).get(name.lower())
        if config is None:
            return None
        with tempfile.TemporaryDirectory(prefix="fsbarrier-plan-") as folder:
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            return cls.of_folder(Path(folder), lora)


def examine(folder: Path, lora: LoraSettings) -> ModelShape:
    """Run training/architecture.py for a model folder with such adapters. Raises UsageError with the program's reason."""
    arguments = (str(lora.rank), *lora.targets) if lora.rank else ()
    said = run_check(
        f"making the model of {folder}", "fsbarrier.training.architecture", str(folder), *arguments
    )
    # Libraries may have printed something before.
    return msgspec.json.decode(said.strip().splitlines()[-1], type=ModelShape)


def run_check(what: str, module: str, *arguments: str) -> str:
    """The output of a program of this package that loads large libraries, which this process must not. Raises UsageError with the
    program's last line; `what`: what it does, for a program that takes too long."""
    try:
        done = subprocess.run(
            own_program(module, *arguments),
            env=with_this_package(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MAKING_S,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{what} took more than {MAKING_S:.0f} s") from None
    if done.returncode:
        messages = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UsageError(messages[-1])
    return done.stdout
