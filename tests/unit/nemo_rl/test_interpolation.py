"""`${...}`: values by hand, and what is refused by name. The same values as OmegaConf 2.4.0 gives."""

import pytest

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.nemo_rl.interpolation import resolve


@pytest.mark.parametrize(
    ("raw", "key", "expected"),
    [
        ({"a": {"b": 3}, "x": "${a.b}"}, "x", 3),
        ({"a": {"b": 3}, "x": "n${a.b}of${a.b}"}, "x", "n3of3"),
        ({"a": 512, "b": 4, "x": "${mul:${a}, ${b}}"}, "x", 2048),
        ({"a": 512, "x": "${div:${a},256}"}, "x", 2.0),
        ({"x": "${max:${add:1,2},${mul:2,2}}"}, "x", 4),
        ({"t": 0.8, "x": "${.t}"}, "x", 0.8),
        ({"x": "${y}", "y": "${z}", "z": None}, "x", None),
        ({"l": [5, 6], "x": "${l.1}"}, "x", 6),
        ({"x": "${oc.env:SURELY_NOT_SET_HERE,none}/d"}, "x", "none/d"),
        ({"x": "${oc.env:SET_BY_THE_TEST}/d"}, "x", "folder/d"),
        ({"s": {"q": "${r}"}, "r": {"k": "${v}"}, "v": 1, "x": "${s.q.k}"}, "x", 1),
    ],
)
def test_an_interpolation_is_replaced_by_its_value(raw, key, expected, monkeypatch):
    monkeypatch.setenv("SET_BY_THE_TEST", "folder")
    value = resolve(raw)[key]
    assert (value, type(value)) == (expected, type(expected))


def test_one_dot_more_is_one_section_up():
    raw = {"t": 1, "p": {"t": 2, "q": {"t": 3, "x": "${.t}${..t}${...t}"}}}
    assert resolve(raw)["p"]["q"]["x"] == "321"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"s": {"x": "${a.b}"}}, "s.x: ${a.b}: there is no a"),
        ({"x": "${y}", "y": "${x}"}, "x: interpolations form a circle: x -> y -> x"),
        (
            {"x": "${oc.decode:a}"},
            "x: no resolver 'oc.decode' in ${oc.decode:...}; there are oc.env, add, mul, div, max",
        ),
        ({"x": "${oc.env:SURELY_NOT_SET_HERE}"}, "the environment variable SURELY_NOT_SET_HERE is not set"),
        ({"x": "${mul:2}"}, "x: ${mul:...} takes two numbers, found [2]"),
        ({"x": "${div:1,0}"}, "x: ${div:...} of [1, 0]: division by zero"),
        ({"x": "${a"}, "a ${ is not closed"),
        ({"x": "\\${a}"}, "escaped interpolations are not supported"),
        ({"x": "${a[0]}"}, "${a[0]} is no reference"),
        ({"s": {"x": "???"}}, "s.x = ???: has to be given"),
    ],
)
def test_what_cannot_be_resolved_is_refused_by_name(raw, message):
    with pytest.raises(ConfigError) as caught:
        resolve(raw)
    assert message in str(caught.value)
