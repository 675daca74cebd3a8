"""Loading adapted models by from_pretrained: the key "attnlab" of config.json says that a model has mechanisms.

No code of the model's folder runs: attnlab.json names mechanisms of the installed attnlab. A mechanism in a user's file
needs attnlab.load(…, allow_code=True). Nothing here imports transformers.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from attnlab.huggingface.adaptation import MARK

HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")  # ways to a file
ADDED = r"\.attnlab(_queries)?\."  # in the names of weights that transformers does not expect

_PLAIN: ContextVar[bool] = ContextVar("attnlab_plain_loading", default=False)


@contextmanager
def load_plain() -> Iterator[None]:
    """Let from_pretrained load adapted models without their mechanisms while the context is open."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def extend_loading(base: Any) -> None:
    """Replace from_pretrained of all models by one that also installs the mechanisms of adapted models."""
    own = base.from_pretrained.__func__
    if hasattr(own, "attnlab_original"):
        return

    @wraps(own)
    def from_pretrained(kind: Any, name: Any, *arguments: Any, **options: Any) -> Any:
        if _PLAIN.get() or not is_marked(name, options):
            return own(kind, name, *arguments, **options)
        from attnlab.huggingface import pretrained

        check_implementation(name, options)
        if name is None:
            raise ValueError(
                "an adapted model needs its folder or id: from_pretrained(folder), or attnlab.load(folder)"
            )
        how = {key: options[key] for key in HUB if options.get(key) is not None}
        saved, place = pretrained.find_saved(os.fspath(name), how, allow_code=False)
        with load_plain(), ignore_added(kind):
            loaded = own(kind, name, *arguments, **options)
        pretrained.restore_adaptation(loaded[0] if isinstance(loaded, tuple) else loaded, saved, place)
        return loaded

    from_pretrained.attnlab_original = own  # type: ignore[attr-defined]
    base.from_pretrained = classmethod(from_pretrained)


def is_marked(name: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the config of a model says that it is adapted."""
    from attnlab.huggingface import pretrained

    config = options.get("config")
    if config is not None and not isinstance(config, str | os.PathLike):
        return bool(getattr(config, MARK, None))
    how = {key: options[key] for key in HUB if options.get(key) is not None}
    return bool(pretrained.read_config_values(name if config is None else config, how).get(MARK))


def check_implementation(name: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError if another attention is asked for, which would bypass the mechanisms."""
    asked = options.get("attn_implementation") or getattr(options.get("config"), "_attn_implementation_internal", None)
    if asked is not None and asked != "attnlab":
        raise ValueError(f"{name} is an adapted model: leave out attn_implementation={asked!r}")


@contextmanager
def ignore_added(kind: Any) -> Iterator[None]:
    """Keep transformers from reporting the mechanisms' weights as unexpected while the context is open."""
    before = vars(kind).get("_keys_to_ignore_on_load_unexpected")
    had = "_keys_to_ignore_on_load_unexpected" in vars(kind)
    kind._keys_to_ignore_on_load_unexpected = [*(kind._keys_to_ignore_on_load_unexpected or []), ADDED]
    try:
        yield
    finally:
        if had:
            kind._keys_to_ignore_on_load_unexpected = before
        else:
            del kind._keys_to_ignore_on_load_unexpected
