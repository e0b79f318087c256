"""max, min and ceil for numbers and for arrays of them alike.

So that one formula gives the cost of one policy and, called with arrays for its sizes, of all rows of the planner's
table at once. Types say float throughout: a formula needn't know which of the two it was given.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np


def _is_array(*values: object) -> bool:
    return any(isinstance(value, np.ndarray) for value in values)


def larger(left: float, right: float) -> float:
    return cast(float, np.maximum(left, right)) if _is_array(left, right) else max(left, right)


def smaller(left: float, right: float) -> float:
    return cast(float, np.minimum(left, right)) if _is_array(left, right) else min(left, right)


def rounded_up(value: float) -> int:
    return cast(int, np.ceil(value)) if _is_array(value) else math.ceil(value)
