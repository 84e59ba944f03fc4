"""Unties the output head of a model with tied embeddings, for this node's servers only.

vLLM loads such a model correctly at start, but a reload in place may silently keep the old head. The servers therefore get a local folder
of links in which the embedding is duplicated as a separate head. Training, publishing and export keep the tied model.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from fsbarrier.engine.model import INDEX, ModelFolder, inspect, tensors_in, weight_files
from fsbarrier.errors import ProgramFailed
from fsbarrier.store import files, reading

EMBEDDINGS, HEAD = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"), "lm_head.weight"
HEAD_FILE = "model-head.safetensors"
# The architectures whose reload is tested with the real vLLM (tests/test_architectures.py, tests/test_vision_inputs.py). vLLM's Gemma 2,
# for example, does not support a separate head and would not start. Other tied models are restarted instead of reloaded.
KNOWN = frozenset({"gemma", "llama", "qwen2", "qwen3", "qwen3_vl"})
COPY_BYTES = 16 << 20


# The replicas of a node request the same folder concurrently.
_making = threading.Lock()


def with_own_head(model: ModelFolder, policy_version: int, place: Path) -> ModelFolder:
    """The folder to serve for `model`: an untied copy in `place` if the model is tied and its architecture supports it, else `model`.

    Removes copies of other policies in `place`. Raises ProgramFailed.
    """
    if not model.tied or model.signature is None or model.config.get("model_type") not in KNOWN:
        return model
    holding = [(file, tensors_in(file)) for file in weight_files(model.path)]
    embeddings = [
        (file, begin, entries[name])
        for file, (begin, entries) in holding
        for name in EMBEDDINGS
        if name in entries
    ]
    if len(embeddings) != 1 or any(name.endswith(HEAD) for _, (_, entries) in holding for name in entries):
        return model
    ((file, begin, embedding),) = embeddings
    folder = place / f"{policy_version}-{hashlib.sha256(bytes(model.path)).hexdigest()[:12]}"
    try:
        with _making:
            if not folder.is_dir():
                files.discard(place)
                made = folder.with_suffix(".part")
                files.make_dirs(made)
                for path in model.path.iterdir():
                    if path.name not in ("config.json", INDEX):
                        os.symlink(path, made / path.name)
                _write_head(made / HEAD_FILE, file, begin, embedding)
                _write_descriptions(made, model)
                os.rename(made, folder)
    except OSError as error:
        raise ProgramFailed(f"{error.filename or folder}: {error.strerror or error}") from None
    return inspect(folder)


def _write_head(target: Path, file: Path, begin: int, embedding: dict[str, Any]) -> None:
    first, last = embedding["data_offsets"]
    size = last - first
    header = json.dumps({HEAD: {**embedding, "data_offsets": [0, size]}}).encode()
    with file.open("rb") as source, target.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        source.seek(begin + first)
        while size:
            block = source.read(min(size, COPY_BYTES))
            if not block:
                raise ProgramFailed(f"{file}: shorter than its header says; the file is damaged")
            stream.write(block)
            size -= len(block)


def _write_descriptions(folder: Path, model: ModelFolder) -> None:
    config = {**model.config, "tie_word_embeddings": False}
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = {**text, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    if (model.path / INDEX).is_file():
        index = reading.json_object(model.path / INDEX, ProgramFailed)
        index["weight_map"][HEAD] = HEAD_FILE
        (folder / INDEX).write_text(json.dumps(index))
