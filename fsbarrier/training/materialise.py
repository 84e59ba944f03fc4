"""Makes a policy version whole: the single way in which export, `init_from`, engines and trainers get the weights of a version whose folder
lacks them (checkpoints.Base). Imports no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fsbarrier.engine.model import INDEX
from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.checkpoints import ADAPTER, Base, Manifest
from fsbarrier.rundir.hashed_file import copy_hashed
from fsbarrier.store import files, reading
from fsbarrier.training import merge_adapters
from fsbarrier.training.merge_adapters import FLOATS, AdapterFiles
from fsbarrier.training.weight_delta import Source, rebuild

#: the folder of a version that has deltas of the files of weights
DELTA = "delta"
#: the file in a folder without weights that says to people what to do
README_NAME = "README"
_README = """\
The weights of this policy version are not here: {what}.
To make an ordinary model folder of it:

    fsbarrier export ./my-model --policy-version {version} --log-path {log_path}
"""


def materialise(
    version: Path,
    into: Path,
    first_model: Path | None,
    between_reads: Callable[[], None] = lambda: None,
    near: Path | None = None,
) -> None:
    """Make the whole model folder of the complete policy version in `version`; `into` is a new or an empty folder.

    `first_model`: the model with which the run began. `near`: a local copy of another version of the same anchor, from which the weights
    are made if that is possible. Every file is compared with the manifest. Raises ProgramFailed naming what is damaged
    or missing, OSError, and what `between_reads` raises.
    """
    manifest = checkpoints.check_sizes(version)
    files.make_dirs(into)

    def copy(name: str) -> None:
        between_reads()
        target = into / name.removeprefix("model/")
        files.make_dirs(target.parent)
        checkpoints.copy_listed(version / name, target, manifest.files[name], version.parent)

    checkpoints.for_all(copy, [name for name in manifest.files if name.startswith("model/")])
    base = manifest.base
    if base is None or manifest.whole:
        return
    if not base.folder:
        _merge(version, base, into, first_model, between_reads)
        return

    def make(name: str) -> None:
        if near is None or not _made_from_near(version, base, name, near, into, between_reads):
            _apply(version, base, name, into, between_reads)

    checkpoints.for_all(make, base.files)


def size_of(version: Path, manifest: Manifest, first_model: Path | None) -> int:
    """About how many bytes the whole model folder of a version has. Raises ProgramFailed, OSError."""
    listed = sum(file.size for file in manifest.model_files.values())
    if manifest.whole or first_model is None or (manifest.base is not None and manifest.base.folder):
        return listed
    return listed + merge_adapters.merged_size(first_model, precision_of(version / "model"))


def precision_of(model: Path) -> str:
    """The precision of a model's weights, by its configuration. Raises ProgramFailed."""
    config = reading.json_object(model / "config.json", ProgramFailed)
    named = config.get("dtype", config.get("torch_dtype"))
    if named not in FLOATS:
        raise ProgramFailed(f"{model / 'config.json'}: dtype {named!r} is none of {', '.join(FLOATS)}")
    return str(named)


def readme(version: Path, number: int, base: Base) -> bytes:
    """The content of the file README_NAME in the model folder of a version that is not whole."""
    what = f"it consists of what has changed ({DELTA}/) in the weights of {base.folder}"
    if not base.folder:
        what = f"it consists of adapters (model/{ADAPTER}/), which belong to the run's first model"
    return _README.format(what=what, version=number, log_path=version.parent.parent).encode()


def delta_of(version: Path, file: str) -> Path:
    """The delta of a file of weights."""
    return version / DELTA / f"{file}.delta"


def _apply(version: Path, base: Base, name: str, into: Path, between_reads: Callable[[], None]) -> None:
    """Make one file of weights from the anchor and the delta. Raises ProgramFailed naming the one of them that is damaged."""
    anchor, file = version.parent / base.folder, name.removeprefix("model/")
    listed = checkpoints.read_manifest(anchor).files[name]
    delta = delta_of(version, file)
    try:
        made, begun = rebuild(Source(anchor / name, apply=delta), into / file, between_reads)
    except FileNotFoundError as error:
        raise ProgramFailed(f"{error.filename}, of which {version.name} is made, is not there") from None
    if begun != listed.sha256:
        raise checkpoints.differs(anchor / name)
    if made != base.files[name]:
        raise checkpoints.differs(delta)


def _made_from_near(
    version: Path, base: Base, name: str, near: Path, into: Path, between_reads: Callable[[], None]
) -> bool:
    """Make one file of weights from a local copy of another version, by undoing that version's delta; False if the result is a different
    file."""
    other, file = version.parent / near.parent.name, name.removeprefix("model/")
    undo = None if other.name == base.folder else delta_of(other, file)
    target = into / file
    try:
        made, _ = rebuild(
            Source(near / file, undo=undo, apply=delta_of(version, file)), target, between_reads
        )
    except (OSError, ProgramFailed):
        made = None
    if made != base.files[name]:
        files.discard(target)
        return False
    return True


def _merge(
    version: Path, base: Base, into: Path, first_model: Path | None, between_reads: Callable[[], None]
) -> None:
    """Merge the adapters, which have been copied to `into`, into the first model's weights."""
    if first_model is None or not first_model.is_dir():
        raise ProgramFailed(
            f"{version} has only adapters, and the model to which they belong is not there: {first_model}; "
            "put the run's first model back at this path"
        )
    adapters = AdapterFiles.read(into / ADAPTER, base.renamed)
    digest = merge_adapters.merge(first_model, adapters, precision_of(into), into, between_reads)
    if digest != base.digest:
        raise another_model(version, first_model)
    if (first_model / INDEX).is_file():
        copy_hashed(first_model / INDEX, into / INDEX)


def another_model(version: Path, first_model: Path) -> ProgramFailed:
    """The failure of a run whose first model has been changed."""
    return ProgramFailed(
        f"{first_model} is not the model to which the adapters of {version.name} belong: its weights have been changed since; put the "
        "original files back"
    )
