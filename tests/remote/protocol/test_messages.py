from gfn_rb.remote.protocol.messages import describe_error, one_line, remote_error


def caught(message):
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def test_errors_survive_the_journey():
    error = remote_error(3, describe_error(caught("too bad")))
    assert (error.rank, error.reason) == (3, "ValueError: too bad")
    assert "raise ValueError(message)" in error.traceback
    assert str(error).startswith("rank 3: ValueError: too bad\n")


def test_errors_are_cut_to_a_length():
    values = describe_error(caught("x" * 10_000))
    assert len(values["message"]) == 2000
    assert all(len(value) <= 2000 for value in values.values())


def test_what_describes_no_error_is_still_an_error():
    assert remote_error(1, None).reason == "an error: not described"
    assert str(remote_error(1, {"type": "A", "message": "b"})) == "rank 1: A: b"


def test_log_lines_are_one_line():
    assert one_line("a\n  b\tc") == "a b c"
    assert len(one_line("x" * 9999)) == 500
