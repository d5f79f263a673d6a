"""docs/internals/rooms.svg is what ``make figures`` draws of the code as it is."""

from docs.generate import rooms


def test_the_figure_is_drawn_from_this_code():
    assert rooms.FIGURE.read_text() == rooms.drawn(), "run `make figures`"


def test_an_arrow_that_follows_from_others_is_left_out():
    chain = {("a", "b"), ("b", "c"), ("a", "c"), ("c", "d"), ("a", "d")}
    assert {pair for pair in chain if not rooms._follows(*pair, chain)} == {
        ("a", "b"),
        ("b", "c"),
        ("c", "d"),
    }


def test_the_big_rooms_are_all_drawn():
    named = {rooms._named(name, "") for name in rooms.ROOMS} - {""}
    assert named == {name for name, *_ in rooms.BANDS} | set(rooms.FLOOR)
