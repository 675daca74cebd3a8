"""Triton's interpreter without the work that changes nothing: repeated lookups, and checks whose result is not read."""

import inspect
from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


@cache
def _list_builtins(package):
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _is_patched(package):
    """Return whether the builtins of a package are patched; all are patched and restored at once."""
    builtins = _list_builtins(package)
    return bool(builtins) and getattr(package, builtins[0][0]) is not builtins[0][1]


def _patch_builtins(package, builder, scope):
    """Patch the builtins of a package as interpreter._patch_builtin does, unless they are patched already."""
    if not _is_patched(package):
        for name, member in _list_builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _list_languages(function):
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]


_patch_lang = interpreter._patch_lang


def _patch_languages(function):
    """Patch what a function uses as interpreter._patch_lang does, unless the kernel that calls it has done so."""
    if all(map(_is_patched, (tl.tensor, *_list_languages(function)))):
        return interpreter._LangPatchScope()
    return _patch_lang(function)


POINTER = np.dtype(np.uint64)
_find_scalar_type = cache(interpreter._get_np_dtype)


def _find_numpy_type(kind):
    return POINTER if isinstance(kind.scalar, tl.pointer_type) else _find_scalar_type(kind.scalar)


def _make_sizes(shape):
    return tl.constexpr(prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


NO_SIZES, _types = _make_sizes(()), {}
_start_type = tl.block_type.__init__


def _start_block_type(self, element_ty, shape):
    """Do what tl.block_type.__init__ does, but check and name each shape once."""
    key = (element_ty.name, *shape)
    if key not in _types:
        _start_type(self, element_ty, shape)
        _types[key] = vars(self) | {"sizes": _make_sizes(self.shape)}
    vars(self).update(_types[key], element_ty=element_ty)


def _start_tensor(self, handle, kind):
    """Do what tl.tensor.__init__ does; tensors of one shape share its constants."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.numel, self.shape = kind.sizes if kind.is_block() else NO_SIZES


_equal = tl.tuple.__eq__


def _equal_tuples(self, other):
    return tl.constexpr(self.values == other) if type(other) is list else _equal(self, other)


def skip_idle_work():
    """Let the interpreter take about a third of the time; kernels compute the same."""
    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        _list_builtins(package)  # before anything is patched
    interpreter._patch_builtin = _patch_builtins
    interpreter._patch_lang, tl.tuple.__eq__ = _patch_languages, _equal_tuples
    tl.tensor.__init__, tl.block_type.__init__ = _start_tensor, _start_block_type
    interpreter._get_np_dtype = _find_numpy_type
    options = interpreter.interpreter_builder.options
    if not options.debug:  # without debug, the result of a check of integer overflow is not read
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
