"""The dimensions of a model that determine its memory use, from config.json and, if available, the headers of its weights.

Reads no weights and imports no libraries. Missing configuration values default to those of the Llama family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from fsbarrier import reading
from fsbarrier.engine.model import Config, inspect, number, text_config
from fsbarrier.errors import UsageError
from fsbarrier.planning.model_layers import LayerPart, attention, feed_forwards, indexer

# Without these nothing can be computed.
_NEEDED = ("hidden_size", "num_hidden_layers", "vocab_size")
# Model types whose layers have two norms more, without saying so in the configuration.
_FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text", "glm4")
# Gemma's configuration says nothing of its tied head: that is the default there.
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. `attention` and `key_value`: the widths of all `heads`, and of all heads of keys.

    `cached`: the numbers that the engine keeps of a token and layer, over at most `key_value_heads` of its accelerators.
    `feed_forward`: the width that one token passes through, of all its experts together. `experts`: the parameters of a layer's largest
    tensor of experts, 0 where there are none. `block`: the parameters of the largest layer. `parts`: what the layers are made of,
    and how many of them have it.
    """

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    attention: int
    key_value: int
    cached: int
    feed_forward: int
    experts: int
    vocabulary: int
    block: int
    tied: bool
    parameters: int
    parts: tuple[tuple[LayerPart, int], ...]

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def largest_unit(self) -> int:
        """The most parameters that a sharded update gathers at once: a layer, the embedding or the head."""
        return max(self.block, self.embedding)

    @classmethod
    def of_config(cls, config: Config, called: str = "config.json") -> Self:
        """Raises UsageError naming what the configuration lacks. `called`: its name in the message."""
        text = text_config(config)
        missing = [name for name in _NEEDED if not number(text, name, 0)]
        if missing:
            raise UsageError(f"{called} lacks {', '.join(missing)}")
        kind = str(text.get("model_type", ""))
        hidden, layers = number(text, "hidden_size", 1), number(text, "num_hidden_layers", 1)
        attends, (chooses, choosing) = attention(text, hidden), indexer(text, hidden, layers)
        forwards = feed_forwards(text, hidden, layers)
        norms = LayerPart(others=hidden * (4 if kind in _FOUR_NORMS else 2))
        parts = [(attends.part, layers), (norms, layers), (chooses, choosing)]
        parts += [(kind.part, count) for kind, count in forwards]
        largest = max(one.part.parameters for one, _ in forwards)
        vocabulary = number(text, "vocab_size", 1)
        said = config.get("tie_word_embeddings", text.get("tie_word_embeddings", kind in _TIED))
        tied = bool(said)
        inside = sum(part.parameters * count for part, count in parts)
        return cls(
            layers=layers,
            hidden=hidden,
            heads=attends.heads,
            key_value_heads=attends.cached_heads,
            attention=attends.width,
            key_value=attends.key_value,
            cached=attends.cached,
            feed_forward=max(one.width for one, _ in forwards),
            experts=max(one.experts for one, _ in forwards),
            vocabulary=vocabulary,
            block=attends.part.parameters + norms.parameters + chooses.parameters + largest,
            tied=tied,
            parameters=inside + hidden + (1 if tied else 2) * vocabulary * hidden,
            parts=tuple(parts),
        )

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Of a model folder, whose weights may be missing. Raises UsageError, and ProgramFailed for damaged weights."""
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} has no config.json; give a Hugging Face model folder")
        config = folder / "config.json"
        shape = cls.of_config(reading.json_object(config, UsageError), str(config))
        if not any(folder.glob("*.safetensors")):
            return shape
        model = inspect(folder)
        # A tied head that the folder holds all the same is no parameter of its own.
        return replace(shape, parameters=model.parameters or shape.parameters)

    def adapter_parameters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """How many numbers low-rank adapters of `rank` have, on the named linear layers of each block; (): on all of them."""
        named = {target.rpartition(".")[2] for target in targets}
        return rank * sum(
            count * part.adapter_sides(name)
            for part, count in self.parts
            for name in part.linear
            if name in named or not targets
        )
