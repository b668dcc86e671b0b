from __future__ import annotations

import string
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.math.answers.comparison import Policies, judge

EQUAL = r"""
(3,2) ~ (p,q)=(3,2)
11 ~ x = 5+5+1 = 11
11 ~ 5+6 = 11
(1,2),(3,4) ~ (3,4),(1,2)
12 ~ 12^{\mathrm{th}} grade
(0,9)\cup(9,36) ~ (0,36)\setminus\{9\}
\mathbb{R}\setminus\{3\} ~ (-\infty,3)\cup(3,\infty)
x\ne 3 ~ (-\infty,3)\cup(3,\infty)
x<1 or x>3 ~ (-\infty,1)\cup(3,\infty)
[0,2] ~ [0,1]\cup[1,2]
\{x \mid x > 3\} ~ (3,\infty)
(3,\infty) ~ 3<x
x \in [-2,7] ~ [-2,7]
288\pi ~ 288pi
198\% ~ 198
864 \mbox{ inches}^2 ~ 864
864 \mbox{ inches}^2 ~ 864 square inches
1\text{ hour} ~ 60 minutes
10 ~ 10 m/s
18\text{ ways.} ~ 18 ways
60 ~ 60 miles per hour
2.5\text{ million} ~ 2{,}500{,}000
\$1,250.50 ~ 1250.5
50\text{ cents} ~ \$0.50
\text{(C)} ~ \textbf{(C)}
\text{A,D} ~ D, A
\text{June 20} ~ June 20
\text{1:03 PM} ~ 1:03 p.m.
\text{ellipse} ~ an ellipse
\text{no solution} ~ \emptyset
1\frac{4}{5} ~ 1.8
\frac{4}{3} ~ 1.\overline{3}
\frac{9}{7} ~ {9\over 7}
11\sqrt2 ~ 11√2
\cot x ~ \frac{\cos x}{\sin x}
\sin 3x ~ 3\sin x-4\sin^3 x
\sin^{-1}(1/2) ~ \frac{\pi}{6}
2\cos 15^{\circ} ~ \frac{\sqrt6+\sqrt2}{2}
36x \sqrt{35x} ~ 36\sqrt{35}x^{3/2}
\sqrt[3]{-8} ~ -2
e^{i\pi} ~ -1
|x-3| ~ |3-x|
\log_2 8 ~ 3
\ln(x^2+1) ~ \log(x^2+1)
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} ~ \begin{bmatrix} \frac{1}{5} \\ -3.6 \end{bmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} ~ (1,2)
5x - 7y + 4 = 0 ~ -10x+14y-8=0
\frac{x^2}{16} - \frac{y^2}{9} = 1 ~ 9x^2-16y^2=144
f(2) < f(1) < f(4) ~ f(4)>f(1)>f(2)
\{1\pm\sqrt{5},-2\} ~ 1+\sqrt5, 1-\sqrt5, -2
3 \pm 2\sqrt2 ~ x = 3+2\sqrt{2} \text{ or } x=3-2\sqrt2
a_n = 2n+1 ~ 2n+1
\frac{1}{2004!} ~ 1/2004!
100,200 ~ 200, 100
1:2 ~ \frac12
7 ~ \boxed{7}
7 ~ **7**
7 ~ The final answer is 7
42 ~ = 42
42 ~ \textcolor{red}{42}
42 ~ So the answer is $42$.
18 ~ 18\$
\frac{1}{3} ~ 0.\dot{3}
3:4 ~ 3 to 4
1.5\times 10^{8} ~ 1.5 x 10^8
(-\infty, -3] \cup [3, \infty) ~ (-oo,-3] U [3,oo)
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ \left[\begin{array}{cc}1&2\\3&4\end{array}\right]
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ [[1,2],[3,4]]
\text{(B)} ~ B)
\frac{3}{4} ~ \text{$\frac{3}{4}$}
5 ~ \text{5 cm}
5 ~ \text{The answer is: } 5
0.5 ~ \text{1/2}
1000000 ~ 1 000 000
\frac13 ~ .\overline{3}
150000000 ~ 1.5x10^8
0.00015 ~ 1.5 × 10⁻⁴
x_1^4 ~ x₁⁴
3\frac58 ~ 3⅝
2\sigma ~ ２σ
\frac{1+\sqrt5}{2} ~ {1+\sqrt5 \over 2}
10 ~ {5 \choose 2}
\frac12 ~ \nicefrac{1}{2}
15 ~ 5!!
101_2 ~ (101)_2
5.1 ~ x \approx 5.1
\sqrt{2} ~ x=\sqrt2 \approx 1.414
\frac{\pi}{2}\text{ radians} ~ 90^\circ
(2,1) ~ y=1, x=2
(3,5) ~ x>3 \text{ and } x<5
\sin x ~ sinx
2x ~ 2\mathrm{x}
5\text{ p.m.} ~ 5 pm
5\text{ or more} ~ 5\text{ or more}
6\text{ hours and }20\text{ minutes} ~ 6 \text{ hours and } 20 \text{ minutes}
x=5\text{ cm} ~ x = 0.05\text{ m}
x \not= 3 ~ x\ne 3
3\frac18 ~ 3 125/1000
¥500 ~ 500
\text{June 20} ~ June 20
120 ~ \frac{10!}{3!7!}
\frac{a}{b} ~ \frac ab
xy^2 ~ x\cdot y^2
xy(3x-2y) ~ 3x^2y-2xy^2
72 ~ 2^{3}3^{2}
\sqrt{ab} ~ \sqrt{a}\sqrt{b}
4 ~ 4 \text{ (four)}
4 ~ 4th
4:05 ~ 4:05
ae^{bx} ~ a e^{bx}
\frac{1}{ab} ~ 1/ab
b\sqrt a ~ \sqrt ab
5 ~ f(2)=5
5 ~ \text{Final answer is } 5
\text{I and III} ~ I, III
36\text{ km/h} ~ 10\text{ m/s}
"""

DIFFERENT = r"""
5 ~ 5, 6
(1,2) ~ (2,1)
(1,2) ~ [1,2]
(1,2) ~ 1,2
\{1,2\} ~ (1,2)
\frac{1+\sqrt5}{2} ~ 1+\frac{\sqrt5}{2}
\frac{11+9a}{20} ~ 11+9a/20
2\pi ~ 6.283185307179586
\sqrt2 ~ 1.41421356237309504880168872420969807856967
1/3 ~ 0.3333333333333333
\frac{1}{3}x ~ 0.3333333333x
16 ~ \leq 16
52_8 ~ 52_9
40 ~ 40_9
1\pm2i ~ 2\pm i
42 ~ 4 2
\frac{1}{2} ~ \frac{1}{2
\sqrt{x^2} ~ x
10^{30}+\sqrt2 ~ 10^{30}+\sqrt3
10\text{ cm} ~ 10\text{ m}
\$36 ~ 36^\circ
(3,\infty) ~ x \ge 3
y>3 ~ x>3
x=5 ~ x=6
x=1, y=2 ~ x=2, y=1
7 ~ 7,7
7 ~ 7 or 8
7 ~ (7,8)
7 ~ any number
7 ~ 7x
7 ~ 6 = 7
6 ~ 1|2|3
1 ~ 0.99999999999999999
(0,1)\cup(1,2) ~ (0,2)
\begin{pmatrix}1\\2\end{pmatrix} ~ (2,1)
4:3 ~ 3:4
B ~ \text{A or B}
A,D ~ A
2^{10} ~ 210
\infty ~ 10^{100}
3 ~ \pm 3
100! ~ 100!+1
2.5 ~ 2,5
x^2=4 ~ x=2
42 ~ 42 \text{ or } 43
42 ~ > 42
42 ~ 42 \text{, but not } 43
42 ~ I think that it may well be 42, although one could also say that 43 is right
0.5 ~ 0,5
\pi ~ \frac{22}{7}
\pi ~ 180
20 ~ 0.2
3 ~ 3\pm0.1
3 ~ 2.5 to 3.5
(1,2) ~ 1.2
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ 1,2,3,4
\text{(B)} ~ A or B
\emptyset ~ \{\emptyset\}
\mathbb{R} ~ R
7 ~ The answer is not 7
x+y ~ xy
\sqrt2+\sqrt3 ~ \sqrt2\sqrt3
(a+b,ab) ~ (ab,a+b)
5 ~ 5\text{ or 6}
5 ~ 5 \text{ or more}
5 ~ 5\text{, not }6
5 ~ 5 squared
5 ~ 5\text{ and a half}
5 ~ 5\text{ hundred}
5 ~ at least 5
5 ~ 5\mathrm{x}
5 ~ 5 \approx 6
5 ~ x = 5 = 6
720 ~ 3!!
1+\frac{\sqrt5}{2} ~ {1+\sqrt5 \over 2}
\overline{z} ~ z
\sqrt2 ~ \sqrt2+10^{-12}
e^{-40} ~ e^{-50}
e^{-40} ~ 0
10^{-20}x ~ 2\cdot 10^{-20}x
e^{-40}+e^{-41} ~ e^{-40}+e^{-42}
(1,2) ~ y=1, x=2
x=5\text{ cm} ~ x=5\text{ m}
f(2)=5 ~ f(3)=5
5\text{ p.m.} ~ 5\text{ a.m.}
\text{5 June} ~ \text{5 July}
1\text{ radian} ~ 1^\circ
12\text{ km/h} ~ 12\text{ mph}
12\text{ m/s} ~ 12\text{ m/s}^2
12\text{ m/s} ~ 12\text{ m}
f ~ f'
7 ~ 7 8
xy^2 ~ (xy)^2
xe^x ~ (xe)^x
10 ~ 2p=10
4 ~ 4:01
4 ~ 4 negative
\sqrt{x} ~ \sqrt{-x}
"""


def pairs(lines: str) -> list[tuple[str, str]]:
    return [(gold, answer) for gold, _, answer in (line.partition(" ~ ") for line in lines.strip().splitlines())]


@pytest.mark.parametrize(("gold", "answer"), pairs(EQUAL))
def test_two_ways_to_write_one_answer_are_equal(gold: str, answer: str) -> None:
    assert judge(answer, gold).verdict == "yes"
    assert judge(gold, answer).verdict == "yes"


@pytest.mark.parametrize(("gold", "answer"), pairs(DIFFERENT))
def test_different_answers_are_different(gold: str, answer: str) -> None:
    assert judge(answer, gold).verdict == "no"


@pytest.mark.parametrize(
    "answer",
    ["9**9**9", "99999999!", "((9!)!)!", "7^{7^{7^{7}}} \\bmod 100", "1e999999999", "\\binom{1000000000}{500000000}"],
)
def test_a_huge_answer_is_wrong_without_being_computed(answer: str) -> None:
    assert judge(answer, "\\sqrt{2}") == ("no", "monstrous", True)


def test_a_number_too_large_to_compute_equals_itself_only() -> None:
    assert judge("10^{10^{10}}", "10^{10^{10}}").verdict == "yes"
    assert judge("10^{10000000000}", "10^{10^{10}}").verdict == "yes"
    assert judge("10^{10^{11}}", "10^{10^{10}}").verdict == "no"


def test_an_unknown_notation_is_undecided() -> None:
    assert judge(r"\sum_{i=1}^{3} i", "6").verdict == "unknown"
    assert not judge("6", r"\sum_{i=1}^{3} i").gold_read


def test_a_number_with_more_digits_than_a_float_is_undecided() -> None:
    assert judge("14142135.6237", r"10^7\sqrt{2}").verdict != "yes"
    assert judge("3141592653589793", r"10^{15}\pi").verdict != "yes"


def test_unevaluated_arithmetic_can_be_rejected() -> None:
    strict = Policies(unevaluated="reject")
    for answer in ("17+25", "6*7", "7!/120", "\\sqrt{1764}", "2^5+10"):
        assert judge(answer, "42").verdict == "yes"
        assert judge(answer, "42", strict).verdict == "no"
    for answer, gold in (
        ("42.0", "42"),
        ("3/4", "0.75"),
        ("1\\frac12", "1.5"),
        ("-42", "-42"),
        ("4.2\\times 10^1", "42"),
        ("17+25=42", "42"),
        ("x = 17+25 = 42", "42"),
    ):
        assert judge(answer, gold, strict).verdict == "yes"


def test_a_percentage_can_be_read_strictly() -> None:
    strict = Policies(percent="strict")
    assert judge("25", r"25\%", strict).verdict == "no"
    assert judge("0.25", r"25\%", strict).verdict == "yes"
    assert judge(r"25\%", r"25\%", strict).verdict == "yes"


def test_an_angle_can_be_read_strictly() -> None:
    strict = Policies(degrees="strict")
    assert judge("90", r"90^\circ", strict).verdict == "no"
    assert judge(r"\frac{\pi}{2}", r"90^\circ", strict).verdict == "yes"


def test_a_number_in_another_base_is_its_digits_or_its_value() -> None:
    assert [judge(answer, "52_8").verdict for answer in ("52", "42")] == ["yes", "no"]
    assert [judge(answer, "52_8", Policies(base="value")).verdict for answer in ("52", "42")] == ["no", "yes"]


def test_the_base_of_a_bare_logarithm_can_be_set() -> None:
    assert judge(r"\ln 2", r"\log 2", Policies(logarithm="ten")).verdict == "no"
    assert judge(r"\ln 2", r"\log 2", Policies(logarithm="natural")).verdict == "yes"


@given(st.fractions(max_denominator=10**6).filter(lambda value: abs(value) < 10**12))
def test_a_number_equals_itself_in_every_notation(value: Fraction) -> None:
    above, below = value.numerator, value.denominator
    sign, size = ("-" if above < 0 else ""), abs(above)
    whole, rest = divmod(size, below)
    written = [
        f"{above}/{below}",
        rf"{sign}\frac{{{size}}}{{{below}}}",
        rf"\dfrac{{{above}}}{{{below}}}",
        f"{3 * above} / {3 * below}",
        f"${above}\\div {below}$",
        f"x = {above}/{below}",
    ]
    if below == 1:
        written += [str(above), f"{above:,}", f"{above}.0", f"{above:,}".replace(",", "{,}"), f"{above}e0"]
    if whole and rest:
        written.append(rf"{sign}{whole}\frac{{{rest}}}{{{below}}}")
    for text in written:
        assert judge(text, written[0]) == ("yes", "exact", True)
        assert judge(text, f"{above + 1}/{below}").verdict == "no"


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_a_set_is_equal_to_its_permutations_and_to_no_part_of_it(items: list[int], random: object) -> None:
    shuffled = sorted(items, key=lambda item: hash((item, str(random))))
    gold = r"\{" + ", ".join(map(str, items)) + r"\}"
    assert judge(", ".join(map(str, shuffled)), gold).verdict == "yes"
    assert judge(", ".join(map(str, shuffled[1:])), gold).verdict == "no"
    assert judge(str(items[0]), gold).verdict == "no"


@given(
    st.text(alphabet=string.printable + "πé²√∞≤１٣\ud800", max_size=60),
    st.sampled_from(["1/2", "x+1", "(1,2)", r"\text{yes}"]),
)
def test_no_text_raises(text: str, gold: str) -> None:
    judge(text, gold)
    judge(gold, text)


FRAGMENTS = (
    r"\frac { } ( ) [ ] 1 2 x ^ _ + - / * \sqrt \pm , \text{a} \sin = < \cup ! | % \circ . \infty : & \\ e i "
    r"\{ \} \log or mod \left. \right. \right| \bar{3} \dot{1} \overline{6} .. ... \| USD P f ' \gcd (3) base"
)


@given(st.lists(st.sampled_from(FRAGMENTS.split()), max_size=30), st.sampled_from(["2", "x+1", "(1,2)", r"\{1,2\}"]))
def test_no_formula_raises(fragments: list[str], gold: str) -> None:
    for text in (" ".join(fragments), "".join(fragments)):
        assert judge(text, gold).verdict in ("yes", "no", "unknown")
        judge(gold, text)
