"""The faults of `mutants.py` can be applied to the code as it is now."""

import ast
import collections
import pathlib

import mutants
import pytest

import accumodel

# The package that is tested: not in this repository where it is installed.
PACKAGE = pathlib.Path(accumodel.__file__).parent
TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize(
    "mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name
)
def test_a_fault_can_be_applied(mutant):
    path, text = mutants.apply(mutant, PACKAGE)
    before = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.dump(ast.parse(text)) != ast.dump(before)
    assert all((TESTS / name).exists() for name in mutant.first.split())


def test_the_names_of_faults_are_unique():
    names = collections.Counter(mutant.name for mutant in mutants.MUTANTS)
    assert [name for name, times in names.items() if times > 1] == []
