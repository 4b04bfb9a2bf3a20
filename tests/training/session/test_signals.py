import signal
import threading

import pytest

from gfn_rb.training.session.run import StopSignals

pytestmark = pytest.mark.slow


def test_a_signal_is_noted_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        assert stop.received is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.received is signal.SIGTERM
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_signal_acts_at_once():
    with StopSignals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_other_threads_leave_signals_alone():
    errors = []

    def work():
        try:
            with StopSignals() as stop:
                assert stop.received is None
        except ValueError as error:  # what signal.signal raises there
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
