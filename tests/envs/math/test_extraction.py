from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.math.extraction import final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So it is \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, \frac{3}{4}\right\}}", r"\left\{1, \frac{3}{4}\right\}"),
        (r"\boxed{5}, no: \boxed{6}", "6"),
        (r"\fbox{7}", "7"),
        (r"\boxed {8}", "8"),
        (r"\boxed 9$.", "9"),
        (r"a stray } and then \boxed{3} and another }", "3"),
        (r"\boxed{5}, in \boxed{} as you asked", "5"),
        ("#### 1,234", "1,234"),
        ("Therefore the answer is 12.\nDone", "12"),
        ("**Answer:** $x^2$", "x^2"),
        ("**Answer: 7**", "7"),
        ("The answer is **7**.", "7"),
        ("The answer is .5", ".5"),
        ("Answer: 7*", "7*"),
        ("Answer: 1, 2, 3...", "1, 2, 3..."),
        ("the answer is $x$ or $y$.", "$x$ or $y$"),
        ("<think>\\boxed{1}</think> \\boxed{2}", "2"),
        ("thought \\boxed{1}</think> It is \\boxed{2}", "2"),
        ("<|channel|>analysis<|message|>\\boxed{1}<|end|><|channel|>final<|message|>\\boxed{2}<|return|>", "2"),
    ],
)
def test_the_final_answer_is_found(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I do not know",
        r"\boxed{5}, no wait \boxed{6",
        r"\boxed{",
        r"\boxed",
        "\\boxed\n",
        r"\boxed $5$",
        r"\boxed{}",
        r"\boxed{ }",
        r"\boxed{5} and then \boxed{",
        r"\boxed{1}</think>",
        "Answer: **",
        r"<think> it may be \boxed{1}",
        r"<|channel|>analysis<|message|>\boxed{1}",
    ],
)
def test_truncated_text_and_thinking_are_no_answer(text: str) -> None:
    assert final_answer(text) is None


def test_a_boxed_answer_can_be_required() -> None:
    assert final_answer("the answer is 12", boxed_only=True) is None
    assert final_answer(r"the answer is \boxed{12}", boxed_only=True) == "12"


@given(
    st.recursive(
        st.sampled_from(["1", "x", r"\{", r"\}", r"\\", " + "]), lambda inner: inner.map(lambda text: "{" + text + "}")
    )
)
def test_nested_braces_are_preserved(inside: str) -> None:
    assert final_answer(rf"so \boxed{{{inside}}} and }} {{") == inside.strip()


@given(
    st.lists(st.sampled_from([r"\boxed", r"\fbox", "{", "}", "$", " ", "\n", "\\", "<think>", "</think>", "#", "1"])),
    st.text(alphabet=r"\boxed{}<think>/# answer:1" + "\n", max_size=80),
)
def test_no_text_raises(pieces: list[str], text: str) -> None:
    final_answer("".join(pieces))
    final_answer(text)
