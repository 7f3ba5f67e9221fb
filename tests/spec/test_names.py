"""Names: what is normalised away, what patterns match, where the layer and the expert stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard_cli.spec.expressions import evaluate
from reshard_cli.spec.headers import StoredTensor
from reshard_cli.spec.model import LogicalTensor, group_experts, model_of_checkpoint
from reshard_cli.spec.names import Pattern, expand_braces, name_fault, normalise, template_of


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod.model.norm", "model.norm"),
        ("model._fsdp_wrapped_module.norm", "model.norm"),
        ("model.layers.0._checkpoint_wrapped_module.w", "model.layers.0.w"),
        ("module.module.norm", "norm"),
        ("model.module.norm", "model.module.norm"),
    ],
)
def test_wrappers_leave_a_name_and_nothing_else_does(name, plain):
    assert normalise(name) == plain


@pytest.mark.parametrize(
    ("name", "template"),
    [
        (
            "model.layers.12.mlp.experts.3.up.weight",
            ("model.layers.{layer}.mlp.experts.{expert}.up.weight", 12, 3),
        ),
        (
            "encoder.layer.0.attention.self.query.bias",
            ("encoder.layer.{layer}.attention.self.query.bias", 0, None),
        ),
        ("experts.5.w", ("experts.{expert}.w", None, 5)),
        ("lm_head.weight", ("lm_head.weight", None, None)),
        ("h.1.blocks.2.w", ("h.{layer}.blocks.2.w", 1, None)),
        ("layers.².experts.³.w", ("layers.².experts.³.w", None, None)),
        ("layers.٣.experts.٤.w", ("layers.٣.experts.٤.w", None, None)),
        (f"layers.{'9' * 5000}.w", (f"layers.{'9' * 5000}.w", None, None)),
    ],
)
def test_the_layer_is_the_first_number_and_the_expert_the_one_after_experts(name, template):
    assert template_of(name) == template


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*", "a.b.c", None),
        ("layers.{layer}.{q,k}.w", "layers.10.k.w", "layers.10.v.w"),
        ("layers.{layer}.w", "layers.0.w", "layers.x.w"),
        ("*.experts.{expert}.*", "m.experts.3.up", "m.experts.up"),
        ("a.b", "a.b", "a_b"),
        ("a.*", "a.b\nc", "b\na.c"),
        ("layers.{layer}.w", "layers.3.w", "layers.³.w"),
        ("layers.{layer}.w", "layers.3.w", "layers.٣.w"),
        ("{a,b}_{c,d}", "b_c", "a_b"),
    ],
)
def test_a_pattern_matches_whole_names(pattern, yes, no):
    assert Pattern(pattern).matches(yes)
    assert no is None or not Pattern(pattern).matches(no)


@pytest.mark.parametrize("name", ["model.norm.weight", "größe.0", "a b", "²", "a-b/c:d"])
def test_a_name_of_printable_characters_is_one(name):
    assert name_fault(name) is None


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "\x1b[31m", "a\x7f", "a\u2028b", "a.{expert}", "a*"])
def test_a_name_that_breaks_tables_or_patterns_is_none(name):
    assert name_fault(name) is not None


def test_choices_expand_in_the_order_written_and_captures_stay():
    assert expand_braces("l.{layer}.{q,k,v}.w") == ["l.{layer}.q.w", "l.{layer}.k.w", "l.{layer}.v.w"]
    assert expand_braces("{a,b}.{c,d}") == ["a.c", "a.d", "b.c", "b.d"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("heads * (nope + rope)", 24), ("7", 7), (7, 7), ("ceil_div(heads, 3)", 2), ("-heads + 10 // 3", -1)],
)
def test_expressions_are_whole_number_arithmetic_of_named_sizes(expression, value):
    assert evaluate(expression, {"heads": 4, "nope": 4, "rope": 2}) == value


@pytest.mark.parametrize(
    "expression",
    [
        "open('x')",
        "().__class__",
        "heads.real",
        "[1][0]",
        "lambda: 1",
        "2 ** 9",
        "True",
        "1.0",
        "",
    ],
)
def test_expressions_are_nothing_more(expression):
    with pytest.raises(ValueError):
        evaluate(expression, {"heads": 4})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7 % 4", 3),
        ("min(3, heads)", 3),
        ("max(3, heads, 9)", 9),
        ("heads == 8", 1),
        ("heads < 8 or heads > 8", 0),
        ("heads >= 8 and 5", 5),
        ("2 if heads != 8 else 6", 6),
        ("heads == 8 or 1 // 0", 1),
    ],
)
def test_expressions_compare_and_choose(expression, value):
    assert evaluate(expression, {"heads": 8}) == value


def test_a_caller_may_add_functions():
    assert evaluate("rows('a.b', 1) + 1", {}, {"rows": lambda name, dim: len(name) + dim}) == 5
    with pytest.raises(ValueError, match="more than"):
        evaluate("rows('a.b')", {})


def test_numbers_in_other_scripts_and_of_many_digits_are_ordered_as_text():
    names = ["layers.10.w", "layers.9.w", "layers.².w", f"layers.{'9' * 5000}.w"]
    stored = {name: StoredTensor(Path("f"), name, "uint8", (1,), 0, 1) for name in names}
    found = [tensor.name for tensor in model_of_checkpoint("m", stored).tensors]
    assert found.index("layers.9.w") < found.index("layers.10.w")
    assert set(found) == set(names)


def test_an_expert_of_two_spellings_stays_a_tensor_of_its_own():
    names = ["layers.0.experts.0.w", "layers.0.experts.1.w", "layers.0.experts.00.w"]
    found = group_experts(LogicalTensor(name, (2,), "uint8") for name in names)
    assert {(tensor.name, tensor.shape) for tensor in found} == {
        ("layers.0.experts.{expert}.w", (2, 2)), ("layers.0.experts.00.w", (2,)),
    }  # fmt: skip
