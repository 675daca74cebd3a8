"""Tell transformers about attnlab: attention functions, their masks, and the loading of adapted models.

This happens as soon as transformers' own files are loaded, before or after attnlab. Nothing here imports transformers,
which would take seconds that most commands can do without.
"""

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PREFIX = "attnlab-"
# mechanisms that need q, k and v only; tests compare this list with the mechanisms themselves
PARAMETER_FREE = (
    "alibi", "cog", "de-attention", "dot", "entmax15", "non", "sigmoid", "sliding-window", "softmax", "softmax1",
    "softpick", "sparsemax", "stick-breaking", "uniform", "xsa",
)  # fmt: skip


def register() -> None:
    """Register with transformers now, or when its files are loaded."""
    waiting = {name: act for name, act in _ACTIONS.items() if name not in sys.modules}
    for name in _ACTIONS.keys() - waiting.keys():
        _ACTIONS[name](sys.modules[name])
    if waiting and not any(isinstance(finder, AfterLoading) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterLoading(waiting))


class AfterLoading(MetaPathFinder):
    """Calls a function with each of some modules after it is loaded for the first time."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self.actions = dict(actions)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if (action := self.actions.pop(fullname, None)) is None:
            return None
        spec = find_spec(fullname)  # by the other finders
        if spec is not None and spec.loader is not None:
            spec.loader = LoadThenAct(spec.loader, action)
        return spec


class LoadThenAct(Loader):
    """A loader that calls a function with the module that it has loaded."""

    def __init__(self, inner: Loader, action: Callable[[ModuleType], None]) -> None:
        self.inner, self.action = inner, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        self.action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def register_functions(modeling_utils: ModuleType) -> None:
    """Register the attention functions, and let from_pretrained install the mechanisms of adapted models."""
    from attnlab.huggingface import auto_loading, dispatch, parameter_free

    functions = {name: parameter_free.make_function(name) for name in PARAMETER_FREE}
    for name, function in functions.items():
        modeling_utils.AttentionInterface.register(PREFIX + name, function)
    modeling_utils.AttentionInterface.register(dispatch.WATCHED, dispatch.attend_watched)
    modeling_utils.AttentionInterface.register(dispatch.WATCHED_BOOL, dispatch.attend_watched)
    modeling_utils.AttentionInterface.register(dispatch.ADAPTED, dispatch.attend)
    auto_loading.extend_loading(modeling_utils.PreTrainedModel)


def register_masks(masking_utils: ModuleType) -> None:
    """Register the mask of each attention function; without one, a model silently gets no mask."""
    from attnlab.huggingface import dispatch

    def build_bool_mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **arguments: Any) -> Any:
        """Return a bool mask, True = may attend. None: nothing is hidden, or only the future where i = j."""
        skip = allow_is_causal_skip and q_length == kv_length
        given = {"q_length": q_length, "kv_length": kv_length, "allow_is_causal_skip": skip}
        return masking_utils.sdpa_mask(**given, **arguments)

    masking_utils.AttentionMaskInterface.register(dispatch.WATCHED, masking_utils.eager_mask)
    for name in (dispatch.WATCHED_BOOL, dispatch.ADAPTED, *(PREFIX + each for each in PARAMETER_FREE)):
        masking_utils.AttentionMaskInterface.register(name, build_bool_mask)


_ACTIONS = {"transformers.modeling_utils": register_functions, "transformers.masking_utils": register_masks}
