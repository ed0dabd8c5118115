"""The whole zoo, in one tuple and by name."""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.cases_autograd import AUTOGRAD
from tests.zoo.cases_backward import BACKWARD
from tests.zoo.cases_language import LANGUAGE
from tests.zoo.cases_numeric import NUMERIC
from tests.zoo.cases_random import RANDOM
from tests.zoo.cases_storage import STORAGE
from tests.zoo.cases_training import TRAINING
from tests.zoo.cases_vision import VISION

CASES: tuple[Case, ...] = VISION + LANGUAGE + STORAGE + RANDOM + NUMERIC + AUTOGRAD + BACKWARD + TRAINING
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "case names must be unique"
