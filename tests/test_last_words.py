"""The end of a worker's stderr."""

import traceback

from lockstep.start.last_words import LastWords


def hear(*texts):
    words = LastWords()
    for now, line in enumerate("\n".join(texts).encode().split(b"\n")):
        words.hear(line, now)
    return words


def traceback_of(function):
    try:
        function()
    except BaseException:
        return traceback.format_exc().rstrip("\n")
    raise AssertionError("did not raise")


def fail(message="it failed"):
    raise ValueError(message)


def chained():
    try:
        fail()
    except ValueError as error:
        raise KeyError("second") from error


def grouped():
    try:
        chained()
    except KeyError as error:
        raise ExceptionGroup("several", [error, ValueError("another")]) from None


CHATTER = "\n".join(f"line {number}" for number in range(10_000))


def test_the_last_traceback_alone_is_kept():
    old, new = traceback_of(fail), traceback_of(lambda: fail("new"))
    words = hear(CHATTER, old, CHATTER, new)
    assert words.text() == new
    assert words.traceback_at == 20_000 + old.count("\n") + 1


def test_a_chain_is_kept_whole_and_counts_from_its_beginning():
    text = traceback_of(chained)
    words = hear("before", text)
    assert words.text() == text
    assert words.traceback_at == 1


def test_a_group_is_kept_whole():
    text = traceback_of(grouped)
    assert hear(CHATTER, text).text() == text


def test_long_messages_and_chains_after_them():
    def long_chain():
        try:
            fail("\n".join(["wide" * 25] * 500))
        except ValueError:
            fail("short")

    text = traceback_of(long_chain)
    assert hear(CHATTER, text, "a warning at exit").text() == text + "\na warning at exit"


def test_what_follows_a_traceback_that_was_caught_is_bounded():
    text = hear(traceback_of(fail), *[CHATTER] * 20).text()
    assert text.startswith("Traceback")
    assert text.endswith("line 9998\nline 9999")
    assert len(text) < 70_000
    assert "lines ..." in text


def test_without_a_traceback_the_last_lines():
    words = hear(CHATTER)
    assert words.text().splitlines()[-1] == "line 9999"
    assert len(words.text().splitlines()) <= 51
    assert words.traceback_at is None


def test_silence():
    assert hear("", "").text() == ""
