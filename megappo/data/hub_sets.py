"""Data sets of the Hugging Face library `datasets`: sets of the hub, folders of files, and folders of `save_to_disk`.

Version 4 and later versions of the library run no code of a data set. Older versions are refused.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from megappo.config.sections.data import HUB_PREFIX
from megappo.errors import first_of, how_to_install, reason
from megappo.models.hub import HubName, http_package
from megappo.network.proxies import client_proxy_problem
from megappo.plugins import users_code

if TYPE_CHECKING:
    import datasets
    import pyarrow

_FIRST_WITHOUT_CODE = 4
_SAVED = ("state.json", "dataset_dict.json")
"""Files that identify a folder of `save_to_disk`: the first file for one split, the second for several splits."""
_MOST_SHOWN = 8


def read_table(source: str, limit: int | None) -> pyarrow.Table:
    """Return the first rows of a split. Raises ValueError if the data set or the library is missing."""
    name, *more = source.removeprefix(HUB_PREFIX).split(":")
    config, split = more[0] if len(more) == 2 else None, more[-1] if more else None
    library = _library(source)
    from huggingface_hub import constants

    name, revision = (name, None) if Path(name).is_dir() else HubName.of(name)
    folder = Path(name)
    if name.startswith((".", "/", "~")) and not folder.is_dir():
        raise ValueError(f"data source '{source}': there is no folder {name} (from {Path.cwd()}); check the path")
    is_saved = any((folder / file).is_file() for file in _SAVED)
    if is_saved and config is not None:
        raise ValueError(f"data source '{source}': a folder of save_to_disk has no configurations; remove {config}")
    if not folder.is_dir() and not constants.HF_HUB_OFFLINE and (problem := client_proxy_problem()):
        raise ValueError(f"data source '{source}' is on the hub, and {problem}")
    commit = None if revision is None else _commit(name, revision, source)
    with users_code(f"data source '{source}' cannot be loaded", "check its name, configuration, files and the network"):
        dataset = library.load_from_disk(name) if is_saved else library.load_dataset(name, config, revision=commit)
    chosen = _split_of(dataset, split, source)
    with users_code(f"data source '{source}' cannot be read", "write it again"):
        rows = len(chosen) if limit is None else min(limit, len(chosen))
        table: pyarrow.Table = chosen.select(range(rows)).with_format("arrow")[:]
    return table


def _commit(name: str, revision: str, source: str) -> str:
    """Return the commit of a revision from the hub. The library alone would use any cached revision without a
    network."""
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
    except (OSError, ValueError, http_package().HTTPError) as error:
        command = f"hf download --repo-type dataset {name} --revision {revision} --local-dir FOLDER"
        raise ValueError(
            f"data source '{source}': the hub does not resolve revision {revision} ({reason(error)}); on a machine "
            f"with a network, run `{command}`, and use the FOLDER as the source"
        ) from error
    return str(commit)


def _library(source: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"data source '{source}' needs a library; {how_to_install('datasets')}") from error
    if int(datasets.__version__.split(".")[0]) < _FIRST_WITHOUT_CODE:
        raise ValueError(
            f"data source '{source}': datasets {datasets.__version__} may run code of a data set, version "
            f"{_FIRST_WITHOUT_CODE} does not; {how_to_install('datasets')}"
        )
    datasets.disable_progress_bars()
    return datasets


def _split_of(loaded: datasets.Dataset | datasets.DatasetDict, split: str | None, source: str) -> datasets.Dataset:
    """Return the named split. Without a name, return the only split or `train`."""
    if not isinstance(loaded, dict):
        if split not in (None, str(loaded.split)):
            raise ValueError(f"data source '{source}' is a single split; remove {split} from it")
        return loaded
    name = split or ("train" if "train" in loaded or len(loaded) != 1 else next(iter(loaded)))
    if name not in loaded:
        raise ValueError(
            f"data source '{source}' has no split '{name}', but {first_of(loaded, _MOST_SHOWN)}; append one of them"
        )
    return loaded[name]
