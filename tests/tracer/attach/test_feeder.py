"""What is handed over is taken in order on another thread, and what goes wrong there stays there."""

import threading

from spectrace.tracer.attach.feeder import Feeder


def test_items_are_taken_in_order_and_an_error_costs_one() -> None:
    taken: list[int] = []

    def take(item: int) -> None:
        if item == 3:
            raise ValueError("three")
        taken.append(item)

    feeder = Feeder(take, queue_bytes=100)
    for item in range(6):
        feeder.put(item, 1)
    feeder.close()
    assert taken == [0, 1, 2, 4, 5] and (feeder.failures, feeder.failure) == (1, "ValueError: three")


def test_there_is_room_again_when_what_waited_is_taken() -> None:
    go = threading.Event()
    feeder = Feeder(lambda _: go.wait(60), queue_bytes=100)
    assert feeder.room()
    feeder.put(object(), 100)
    assert not feeder.room()
    go.set()
    feeder.close()
    assert feeder.room()
