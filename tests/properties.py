"""given, settings and st of hypothesis. Where it is not installed, examples come from a fixed seed.

Without it st has integers, sampled_from and booleans, enough for the kernels; files that need more are skipped.
"""

import functools
import inspect
import random

import pytest

try:
    from hypothesis import given, settings
    from hypothesis import strategies as st
except ImportError:

    def skip_file(*given, **options):
        pytest.skip("hypothesis is not installed", allow_module_level=True)

    class st:  # noqa: N801 (a module there)
        integers = staticmethod(lambda low, high: lambda draw: draw.randint(low, high))
        sampled_from = staticmethod(lambda options: lambda draw: draw.choice(options))
        booleans = staticmethod(lambda: lambda draw: draw.random() < 0.5)
        floats = lists = tuples = frozensets = text = staticmethod(skip_file)

    def given(**strategies):
        def wrap(test):
            @functools.wraps(test)
            def run_examples(**fixtures):
                draw = random.Random(0)
                for _ in range(getattr(run_examples, "max_examples", 25)):
                    test(**fixtures, **{name: strategy(draw) for name, strategy in strategies.items()})

            left = [p for name, p in inspect.signature(test).parameters.items() if name not in strategies]
            run_examples.__signature__ = inspect.Signature(left)
            return run_examples

        return wrap

    def settings(max_examples, **_):
        def wrap(test):
            test.max_examples = max_examples
            return test

        return wrap


__all__ = ["given", "settings", "st"]
