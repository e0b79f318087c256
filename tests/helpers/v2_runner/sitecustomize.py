# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's model runner V2 run on a machine without a GPU, through Triton's interpreter.

On PYTHONPATH (see tests/helpers/engine.py) Python imports this at start-up, in worker processes too. The CPU build of
vLLM switches Triton off unless `triton.backends` lists a backend named "cpu", and without Triton it has only runner V1.
With TRITON_INTERPRET=1 no backend is ever asked to compile anything, so an empty one will do.
"""

import triton.backends


class _InterpreterOnlyDriver:
    @staticmethod
    def is_active() -> bool:
        return False


class _InterpreterOnlyBackend:
    driver = _InterpreterOnlyDriver
    compiler = None


triton.backends.backends.setdefault("cpu", _InterpreterOnlyBackend)
