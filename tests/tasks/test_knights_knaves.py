"""Knights & Knaves: solver, generator, wordings, prompts, reward; the real rows where they are at hand."""

import functools
import itertools
import random
import re
from collections.abc import Sequence

import pytest
from support.refusals import refused
from support.tiers import every

from gradscope.errors import InputError
from gradscope.tasks import Grade, Question, get_task, grade_response
from gradscope.tasks.data import data_folder
from gradscope.tasks.knights_knaves import (
    NAMES,
    draw_statements,
    generate_puzzle,
    prompt,
    read_puzzles,
    reward,
    solve,
)
from gradscope.tasks.knights_knaves_wording import (
    _PREAMBLE,
    _QUESTION,
    COMPACT_NAMES,
    SAYINGS,
    Statement,
    claim_text,
    compact_prompt,
    quiz_text,
)

LEVELS = (3, 4, 5, 6, 7)
KK = data_folder() / "kk"
needs_data = pytest.mark.skipif(
    not KK.is_dir(), reason=f"no Knights & Knaves data at {KK}; set GRADSCOPE_DATA to the folder that holds kk"
)
ATOMS = [("telling-truth", 0), ("lying", 0), ("telling-truth", 1), ("lying", 1)]


# --- solver


def true_claim(statement, knights):
    """The meaning of a claim, spelled out on one assignment."""
    if statement[0] == "telling-truth":
        return knights[statement[1]]
    if statement[0] == "lying":
        return not knights[statement[1]]
    values = [true_claim(part, knights) for part in statement[1:]]
    if statement[0] == "not":
        return not values[0]
    if statement[0] == "and":
        return all(values)
    if statement[0] == "or":
        return any(values)
    if statement[0] == "->":
        return values[1] or not values[0]
    assert statement[0] == "<=>"
    return values[0] is values[1]


def brute_force(statements):
    every = itertools.product((False, True), repeat=len(statements))
    return [a for a in every if all(true_claim(s, a) is knight for s, knight in zip(statements, a, strict=True))]


def random_statement(people, rng, depth=2):
    if depth == 0 or rng.random() < 0.2:
        return (rng.choice(("telling-truth", "lying")), rng.randrange(people))
    operator = rng.choice(("not", "and", "or", "->", "<=>"))
    return (operator, *(random_statement(people, rng, depth - 1) for _ in range(1 if operator == "not" else 2)))


@pytest.mark.parametrize("people", range(1, 8))
def test_the_solver_finds_exactly_the_consistent_assignments_of_nested_claims(people):
    rng = random.Random(people)
    solutions = []
    for _ in range(60):
        statements = [random_statement(people, rng) for _ in range(people)]
        assert solve(statements) == brute_force(statements)
        solutions.append(len(solve(statements)))
    assert 0 in solutions
    assert max(solutions) > 1  # none and several were among them


@needs_data
@pytest.mark.parametrize("people", every(3, LEVELS))
def test_the_solver_agrees_with_every_row_of_the_data(people):
    puzzles = read_rows(people)
    assert len(puzzles) == 1000
    for puzzle in puzzles:
        assert len(puzzle.names) == people
        assert solve(puzzle.statements) == [puzzle.solution]


@functools.cache
def read_rows(people):
    return [p for split in ("train", "test") for p in read_puzzles(KK / f"{people}ppl" / f"{split}.parquet")]


@functools.cache
def parse_rows(people):
    return [parse_quiz(puzzle.quiz) for puzzle in read_rows(people)]


# --- generator


@pytest.mark.parametrize("people", range(2, 9))
def test_a_generated_puzzle_has_exactly_one_solution(people):
    rng = random.Random(people)
    for _ in range(20):
        puzzle = generate_puzzle(people, rng)
        assert len(puzzle.names) == len(set(puzzle.names)) == len(puzzle.statements) == people
        assert brute_force(puzzle.statements) == [puzzle.solution]


def test_generated_puzzles_follow_the_seed():
    drawn = [[generate_puzzle(4, rng) for _ in range(3)] for rng in map(random.Random, (5, 5, 6))]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("people", [1, 9])
def test_one_person_or_nine_are_refused(people):
    with refused(people):
        draw_statements(people, random.Random(0))


@needs_data
@pytest.mark.parametrize("people", every(3, LEVELS))
def test_the_generator_draws_the_datas_kinds_of_claims_as_often_as_the_data(people):
    rng = random.Random(0)
    real = kinds(puzzle.statements for puzzle in read_rows(people))
    drawn = kinds(draw_statements(people, rng) for _ in range(1000))
    assert real.keys() == drawn.keys()
    # Two counts of about 1000 · people claims each: five standard errors of a difference of shares are below 0.05.
    assert all(abs(real[kind] - drawn[kind]) < 0.05 for kind in real)


def kinds(puzzles):
    counts = {}
    for statements in puzzles:
        for speaker, statement in enumerate(statements):
            text = claim_text(statement, ["other" if i != speaker else "self" for i in range(len(statements))])
            kind = (
                statement[0],
                re.sub(r"is (not )?a ", "", text) if statement[0] in ("lying", "not") else "self" in text,
            )
            counts[kind] = counts.get(kind, 0) + 1 / (1000 * len(statements))
    return counts


@needs_data
def test_names_and_sayings_are_those_of_the_data():
    parsed = [row for people in LEVELS for row in parse_rows(people)]
    assert {name for _, names, _ in parsed for name in names} == set(NAMES)
    assert {saying for _, _, sayings in parsed for saying in sayings} == set(SAYINGS)
    assert set(COMPACT_NAMES) <= set(NAMES)


# --- wording, and how it is read back


def parse_quiz(text: str) -> tuple[list[Statement], list[str], list[str]]:
    """Statements, names and sayings of a puzzle in the data set's words: the inverse of `quiz_text`."""
    preamble = _PREAMBLE.replace(".", r"\.").format(count=r"\d+", names="(.+?)")
    match = re.fullmatch(f"{preamble}(.+){re.escape(_QUESTION)}", text)
    if match is None:
        raise InputError(f"not a Knights & Knaves quiz in the data set's words: {text[:60]!r}…")
    names = re.split(", and |, ", match[1])
    statements, sayings, rest = [], [], match[2]
    for name in names:
        claim, saying, rest = _next_spoken(rest, name)
        statements.append(parse_claim(claim, names))
        sayings.append(saying)
    return statements, names, sayings


def _next_spoken(text: str, name: str) -> tuple[str, str, str]:
    for saying in SAYINGS:
        before, after = saying.replace("{name}", name).split("{claim}")
        claim = text.removeprefix(before).partition(after)[0]
        spoken = before + claim + after
        # A claim holds no punctuation: with some, `after` was found in a later sentence.
        if text.startswith(spoken) and not set(claim) & set('",.'):
            return claim, saying, text[len(spoken) :].removeprefix(" ")
    raise InputError(f"{text[:60]!r}… is none of the ways in which {name} may speak; see SAYINGS")


def parse_compact(text: str) -> tuple[list[Statement], list[str]]:
    """Statements and names of a compact puzzle: the inverse of `compact_prompt`."""
    lines = [re.fullmatch(r"(\w+): (.+)\.", line) for line in text.removesuffix("<think>").splitlines()]
    if not lines or None in lines:
        raise InputError(f"not a compact puzzle: {text[:60]!r}…; wanted lines like 'Zoey: Oliver is a knave.'")
    names = [line[1] for line in lines]
    return [parse_claim(line[2], names) for line in lines], names


def parse_claim(text: str, names: Sequence[str]) -> Statement:
    """The statement of a claim: the inverse of `claim_text`."""
    for operator, pattern in (("->", "If (.+) then (.+)"), ("<=>", "(.+) if and only if (.+)")):
        if match := re.fullmatch(pattern, text):
            return (operator, *(_parse_simple(part, names) for part in match.groups()))
    for operator in ("and", "or"):
        if len(parts := text.split(f" {operator} ")) == 2:
            return (operator, *(_parse_simple(part, names) for part in parts))
    return _parse_simple(text, names)


def _parse_simple(text: str, names: Sequence[str]) -> Statement:
    match = re.fullmatch(r"(\w+) is (not )?a (knight|knave)", text)
    if match is None or match[1] not in names:
        raise InputError(f"{text!r} is not a claim about one of {', '.join(names)}; wanted 'NAME is (not) a knight'")
    atom = ("telling-truth" if match[3] == "knight" else "lying", list(names).index(match[1]))
    return ("not", atom) if match[2] else atom


def all_claims():
    negations = [("not", atom) for atom in ATOMS]
    pairs = [(op, a, b) for op in ("and", "or", "->", "<=>") for a, b in itertools.product(ATOMS, repeat=2)]
    return ATOMS + negations + pairs


@pytest.mark.parametrize("statement", all_claims(), ids=str)
def test_a_claim_survives_its_wording(statement):
    names = ["Zoey", "Oliver"]
    assert parse_claim(claim_text(statement, names), names) == statement


@pytest.mark.parametrize("people", range(2, 9))
def test_a_puzzle_survives_both_wordings(people):
    rng = random.Random(people)
    for _ in range(20):
        statements = draw_statements(people, rng)
        names, sayings = rng.sample(NAMES, people), rng.choices(SAYINGS, k=people)
        assert parse_quiz(quiz_text(statements, names, sayings)) == (list(statements), names, sayings)
        assert parse_compact(compact_prompt(statements)) == (list(statements), list(COMPACT_NAMES[:people]))


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (lambda text: parse_claim(text, ["Zoey"]), "Oliver is a knight"),
        (lambda text: parse_claim(text, ["Zoey"]), "Zoey is a spy"),
        (parse_compact, "Zoey is a knight"),
        (parse_compact, ""),
        (parse_quiz, "Once upon a time"),
    ],
)
def test_what_is_no_puzzle_is_refused(parse, text):
    with refused():
        parse(text)


@needs_data
@pytest.mark.parametrize("people", LEVELS)
def test_every_row_of_the_data_is_read_and_worded_again_to_the_letter(people):
    for puzzle, (statements, names, sayings) in zip(read_rows(people), parse_rows(people), strict=True):
        assert (tuple(statements), tuple(names)) == (puzzle.statements, puzzle.names)
        assert quiz_text(puzzle.statements, puzzle.names, sayings) == puzzle.quiz


@needs_data
@pytest.mark.parametrize("people", LEVELS)
def test_every_row_of_the_data_has_our_prompt_to_the_letter(people):
    import pandas as pd

    path = KK / f"{people}ppl" / "test.parquet"
    for puzzle, messages in zip(read_puzzles(path), pd.read_parquet(path)["prompt"], strict=True):
        assert prompt(puzzle) == messages[0]["content"]


@needs_data
@pytest.mark.parametrize("people", LEVELS)
def test_every_row_of_the_data_converts_to_the_compact_wording(people):
    for puzzle in read_rows(people):
        statements, names = parse_compact(compact_prompt(puzzle.statements))
        assert tuple(statements) == puzzle.statements
        assert names == list(COMPACT_NAMES[:people])
        assert solve(statements) == [puzzle.solution]


ROW = {
    "names": ["Zoey", "Oliver"],
    "statements": "(('lying', 1), ('lying', 0))",
    "solution": [True, False],
    "quiz": "Who?",
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"statements": None},
        {"statements": "(('lying', 1"},
        {"statements": "open('x')"},
        {"names": None},
        {"solution": None},
        {"statements": "(" * 400 + ")" * 400},
        {"statements": "5"},
        {"statements": "(1, 2)"},
        {"statements": "(('lying', 1),)"},
        {"statements": "(('foo', 1), ('bar', 2))"},
        {"statements": "(('lying', 1), ('lying', 9))"},
        {"statements": "(('lying', 1), ('lying', -1))"},
        {"statements": "(('lying', 1), ('lying', True))"},
        {"statements": "(('lying', 1), ('not', ('and', ('lying', 1), ('lying', 0))))"},
        {"statements": "(('lying', 1), ('and', ('lying', 1)))"},
        {"statements": "(('lying', 1), (['and'], ('lying', 1)))"},
        {"solution": [True]},
        {"solution": [None, True]},
        {"names": [None, "B"]},
        {"quiz": None},
    ],
)
def test_a_row_that_is_no_puzzle_is_named(tmp_path, wrong):
    file = write_parquet(tmp_path / "p.parquet", [ROW, ROW | wrong])
    with refused("row 1"):
        read_puzzles(file)


def write_parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


# --- reward

NAMED = {"names": ["Zoey", "Oliver"], "solution": [True, False]}
RIGHT = " Zoey is a knight, Oliver is a knave "


def answered(answer, thought="Hm. "):
    return f"{thought}</think><answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("response", "earned"),
    [
        # right: +1 and +2
        (answered(RIGHT), 3.0),
        ("<think>" + answered(RIGHT), 3.0),
        (answered("(1) Zoey is a knight\n(2) Oliver is a knave"), 3.0),
        (answered("oliver IS A KNAVE; zoey\n is \t a Knight"), 3.0),
        (answered(RIGHT) + " And that is all.", 3.0),
        (answered(RIGHT, thought=""), 3.0),
        # wrong about somebody: +1 and -1.5
        (answered(" Zoey is a knave, Oliver is a knave "), -0.5),
        (answered(" Zoey is a knave, Oliver is a knight "), -0.5),
        # not readable: +1 and -2
        (answered(""), -1.0),
        (answered("Zoey is a knight"), -1.0),
        (answered("Zoey is a knight, Olivera is a knave"), -1.0),
        (answered("Zoey is a knight, Oliver is no knave"), -1.0),
        (answered("Zoey is a knight, Zoey is a knave"), -1.0),
        (answered(RIGHT + "and knights rule"), -1.0),  # the substring counts, also inside a word
        (answered(RIGHT + "and Unknightly"), -1.0),
        (answered("Zoey is a knight, Oliver is a knavery"), -1.0),
        (answered("Zoey knight, Oliver knave"), -1.0),
        (answered("Zoey is a knight who says that Oliver is a knave, and Oliver is a knave"), -1.0),
        # bad format: -1 and -2
        ("", -3.0),
        ("Zoey is a knight, Oliver is a knave", -3.0),
        (f"Hm. <answer>{RIGHT}</answer>", -3.0),
        (f"Hm. </think><answer>{RIGHT}", -3.0),
        (f"Hm. </think>{RIGHT}</answer>", -3.0),
        (f"<answer>{RIGHT}</answer></think>", -3.0),
        (f"Hm. </think></answer>{RIGHT}<answer>", -3.0),
        (answered(RIGHT) + answered(RIGHT), -3.0),
        (answered(RIGHT) + "</answer>", -3.0),
        ("<think><think>" + answered(RIGHT), -3.0),
        ("Hm. <think>" + answered(RIGHT), 3.0),  # has one of its own, so none is put before it
        (answered(RIGHT) + "<think>", -3.0),  # its own is in the wrong place
        (answered(RIGHT).replace("answer", "ANSWER"), -3.0),  # tags are lower case
    ],
)
def test_the_reward_is_the_papers(response, earned):
    assert reward(response, **NAMED) == earned


# --- tasks


@pytest.mark.parametrize("name", ["knights-knaves", "knights-knaves-compact"])
def test_the_questions_of_a_seed_are_always_the_same_and_their_right_answer_earns_three(name):
    task = get_task(name)
    questions = task.questions(8, seed=1, people=(2, 3, 8))
    assert questions == task.questions(8, seed=1, people=(2, 3, 8)) != task.questions(8, seed=2, people=(2, 3, 8))
    assert [question.level for question in questions] == [2, 3, 8, 2, 3, 8, 2, 3]
    for question in questions:
        assert question.prompt.endswith("<think>")
        told = zip(question.answer["names"], question.answer["solution"], strict=True)
        words = ", ".join(f"{who} is a {'knight' if knight else 'knave'}" for who, knight in told)
        assert task.reward(answered(words), question) == 3.0
        assert task.reward(answered(words[::-1]), question) == -1.0


@pytest.mark.parametrize("name", ["knights-knaves", "knights-knaves-compact"])
@pytest.mark.parametrize(
    ("response", "grade"),
    [
        (answered(RIGHT), Grade(3.0, correct=True, format_ok=True)),
        (answered("Zoey is a knave, Oliver is a knight"), Grade(-0.5, correct=False, format_ok=True)),
        (answered("I give up"), Grade(-1.0, correct=False, format_ok=True)),  # unreadable, but the tags are in order
        (RIGHT, Grade(-3.0, correct=False, format_ok=False)),
        ("", Grade(-3.0, correct=False, format_ok=False)),
    ],
)
def test_a_grade_tells_right_answers_from_good_format(name, response, grade):
    assert grade_response(get_task(name), response, Question("?", NAMED)) == grade


@needs_data
@pytest.mark.parametrize("name", ["knights-knaves", "knights-knaves-compact"])
def test_questions_can_come_from_a_file_of_the_data(name):
    files = (KK / "3ppl" / "test.parquet",)
    task = get_task(name)
    questions = task.questions(100, seed=0, files=files)
    assert len({question.prompt for question in questions}) == 100
    assert questions == task.questions(None, seed=0, files=files) != task.questions(None, seed=1, files=files)
    assert task.questions(None, seed=0, files=files, people=(3, 4)) == questions
    with refused("101", "test.parquet", "100"):
        task.questions(101, seed=0, files=files)
    with refused("test.parquet"):
        task.questions(1, seed=0, files=files, people=(4,))


@needs_data
def test_questions_can_come_from_many_files_by_one_pattern():
    questions = get_task("knights-knaves").questions(None, seed=0, files=("kk/*/test.parquet",))
    assert sorted(question.level for question in questions) == sorted([*LEVELS] * 100)
    assert len({question.prompt for question in questions}) == 500
    some = get_task("knights-knaves").questions(None, seed=0, files=("kk/*/test.parquet",), people=(3, 7))
    assert {question.level for question in some} == {3, 7}
    assert len(some) == 200
