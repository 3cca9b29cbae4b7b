"""Whether a run stands still, and on whom it waits, judged from what its processes note of themselves."""

import threading
import time
from contextlib import ExitStack

import pytest
from torch.distributed import HashStore

from exgrpo_megatron.hang import Lookout, watched
from exgrpo_megatron.places import Places

LIMIT_S = 100.0


class Ranks:
    """Processes that share a store; their time passes in beats, without a clock."""

    def __init__(self, count):
        store = HashStore()
        self.places = [Places() for _ in range(count)]
        self.lookouts = [
            Lookout(places, lambda: store, rank, count, LIMIT_S) for rank, places in enumerate(self.places)
        ]

    def pass_time(self, seconds, *, stopped=(), each=lambda: None):
        """The first verdict and who has it; None where there is none."""
        beat_s = self.lookouts[0].beat_s
        for _ in range(round(seconds / beat_s)):
            each()
            for rank, lookout in enumerate(self.lookouts):
                if rank not in stopped:
                    verdict = lookout.look(beat_s)
                    if verdict:
                        return rank, verdict
        return None


@pytest.fixture
def enter():
    """Enters places, to be left when the test ends."""
    with ExitStack() as stack:

        def enter(places, *names):
            for name in names:
                stack.enter_context(places.inside(name))

        yield enter


def test_places_say_where_and_how_far_a_process_is():
    places = Places()
    with places.inside("step 3: reward"), places.inside("gathering"):
        place = places.now()
    assert (place.name, place.count) == ("step 3: reward, gathering", 2)
    places.advance()
    after = places.now()
    assert (after.name, after.count, after.moves) == ("between two phases", 4, 5)


def test_a_place_is_left_by_an_error_too():
    places = Places()
    with pytest.raises(ValueError, match="no"), places.inside("step 1: draw"):
        raise ValueError("no")
    assert (places.now().name, places.now().count) == ("between two phases", 2)


def test_the_rank_that_is_behind_is_named_with_its_place_and_those_that_wait_with_theirs(enter):
    ranks = Ranks(4)
    enter(ranks.places[2], "step 3: reward")
    for rank in (0, 1, 3):
        enter(ranks.places[rank], "step 3: reward", "gathering")
    assert ranks.pass_time(LIMIT_S) is None
    rank, verdict = ranks.pass_time(LIMIT_S)
    assert verdict.is_mine
    assert "nothing has moved for 100 s (cluster.hang_timeout_s): rank 2 (" in verdict.text
    assert ") is behind the others: in step 3: reward since " in verdict.text
    assert verdict.text.endswith("; waiting for it: ranks 0-1, 3 in step 3: reward, gathering")
    others = [lookout.look(1.0) for other, lookout in enumerate(ranks.lookouts) if other != rank]
    assert [(other.text, other.is_mine) for other in others] == [(verdict.text, False)] * 3


def test_a_rank_that_gets_on_is_waited_for_until_it_no_longer_does(enter):
    ranks = Ranks(2)
    enter(ranks.places[0], "step 1: rollout", "gathering")
    enter(ranks.places[1], "step 1: rollout")
    assert ranks.pass_time(10 * LIMIT_S, each=ranks.places[1].advance) is None
    _, verdict = ranks.pass_time(2 * LIMIT_S)
    assert "rank 1 (" in verdict.text


def test_a_rank_that_has_been_stopped_is_told_from_one_that_works(enter):
    ranks = Ranks(3)
    for places in ranks.places:
        enter(places, "step 2: update")
    enter(ranks.places[2], "gathering")
    ranks.pass_time(10.0)
    rank, verdict = ranks.pass_time(2 * LIMIT_S, stopped=(1,))
    assert rank != 1
    assert "process" in verdict.text
    assert ") does not answer any more; it was last seen in step 2: update" in verdict.text
    assert verdict.text.count("rank 1 (") == 1
    assert verdict.text.endswith("; waiting for it: rank 0 in step 2: update, rank 2 in step 2: update, gathering")


def test_a_rank_without_a_note_is_waited_for_as_long_as_one_that_does_not_move(enter):
    ranks = Ranks(2)
    enter(ranks.places[0], "step 1: rollout", "gathering")
    enter(ranks.places[1], "step 1: rollout")
    assert ranks.pass_time(3 * LIMIT_S, each=ranks.places[1].advance) is None
    for _ in range(3):  # suspended, or its machine too busy for a note, and then it gets on
        assert ranks.pass_time(0.9 * LIMIT_S, stopped=(1,)) is None
        assert ranks.pass_time(5.0, each=ranks.places[1].advance) is None
    # Found at a reading, of which there is one in a tenth of the limit, and again at the next.
    assert ranks.pass_time(0.95 * LIMIT_S, stopped=(1,)) is None
    _, verdict = ranks.pass_time(0.3 * LIMIT_S, stopped=(1,))
    assert "rank 1 (" in verdict.text
    assert ") does not answer any more; it was last seen in step 1: rollout" in verdict.text


def test_while_the_rank_furthest_behind_moves_a_silent_one_is_not_yet_missed(enter):
    ranks = Ranks(3)
    enter(ranks.places[0], "step 1: rollout", "gathering")
    enter(ranks.places[1], "step 1: rollout")
    enter(ranks.places[2], "step 1: rollout", "gathering")
    ranks.pass_time(10.0)
    assert ranks.pass_time(5 * LIMIT_S, stopped=(2,), each=ranks.places[1].advance) is None
    enter(ranks.places[1], "gathering")
    _, verdict = ranks.pass_time(2 * LIMIT_S, stopped=(2,))
    assert "rank 2 (" in verdict.text.split(") does not answer any more; it was last seen in ")[0]
    assert verdict.text.endswith("; waiting for it: ranks 0-1 in step 1: rollout, gathering")


def test_a_rank_that_never_came_is_named(enter):
    ranks = Ranks(2)
    enter(ranks.places[0], "joining the process group")
    _, verdict = ranks.pass_time(2 * LIMIT_S, stopped=(1,))
    assert "rank 1 never came to the start; waiting for it: rank 0 in joining the process group" in verdict.text
    assert ranks.lookouts[0].table().splitlines()[1] == "rank 1: never came"


def test_ranks_that_all_hang_in_one_place_are_not_blamed_on_one(enter):
    ranks = Ranks(2)
    for places in ranks.places:
        enter(places, "step 5: update")
    _, verdict = ranks.pass_time(2 * LIMIT_S)
    assert "all 2 ranks are in step 5: update since " in verdict.text


def test_time_in_which_the_process_was_stopped_does_not_count():
    ranks = Ranks(1)
    assert ranks.pass_time(LIMIT_S / 2) is None
    assert ranks.lookouts[0].look(100 * LIMIT_S) is None  # as after SIGSTOP and SIGCONT
    assert ranks.pass_time(LIMIT_S) is not None  # judged at 100 s and again a tenth of it later


def test_without_the_store_a_process_says_what_it_knows(enter):
    def gone():
        raise RuntimeError("Connection reset by peer\nstack")

    places = Places()
    lookout = Lookout(places, gone, 1, 2, LIMIT_S)
    enter(places, "step 7: push")
    verdicts = [lookout.look(lookout.beat_s) for _ in range(90)]
    assert verdicts[79] is None  # twice the limit are 80 beats of 2.5 s; the first look sees a new place
    assert verdicts[80] is not None
    assert "is in step 7: push since" in verdicts[-1].text
    assert verdicts[-1].text.endswith("where the others are is not known (Connection reset by peer)")


def test_a_store_that_once_does_not_answer_is_asked_again_on_another_connection(enter):
    store, places, connections = HashStore(), Places(), []

    class Connection:
        def __init__(self):
            connections.append(self)
            self.broken = False

        def __getattr__(self, name):
            if self.broken:
                raise RuntimeError("Broken pipe")
            return getattr(store, name)

    waits = Lookout(places, Connection, 0, 2, LIMIT_S)
    works = Lookout(moving := Places(), lambda: store, 1, 2, LIMIT_S)
    enter(places, "step 1: rollout", "gathering")
    enter(moving, "step 1: rollout")
    for beat in range(200):  # five times the limit
        moving.advance()
        if beat == 150:
            connections[-1].broken = True
        assert works.look(works.beat_s) is None
        assert waits.look(waits.beat_s) is None
    assert len(connections) == 2


def test_the_watch_leaves_the_stacks_of_all_threads_and_the_places_and_ends_the_process(tmp_path):
    left, places, store = threading.Event(), Places(), HashStore()
    messages = []

    def leave(message, speaks):
        messages.append((message, speaks))
        left.set()

    (tmp_path / "hang").mkdir()
    for name in ("rank_00000.txt", "rank_00003.txt"):
        (tmp_path / "hang" / name).write_text("of an earlier run")
    lookout = Lookout(places, lambda: store, 0, 1, 1.0)

    def stuck_here():
        assert left.wait(60)

    with watched(lookout, 0, tmp_path / "hang", leave), places.inside("step 1: reward"):
        stuck_here()
    (message, speaks), *_ = messages
    assert speaks
    assert f"{tmp_path / 'hang'} has the stacks of every process that answered" in message
    assert "in stuck_here" in (tmp_path / "hang" / "rank_00000.txt").read_text()
    assert "step 1: reward" in (tmp_path / "hang" / "places.txt").read_text()
    assert sorted(path.name for path in (tmp_path / "hang").glob("*.txt")) == ["places.txt", "rank_00000.txt"]
    before = (tmp_path / "hang" / "before").iterdir()
    assert {path.name: path.read_text() for path in before} == dict.fromkeys(
        ("rank_00000.txt", "rank_00003.txt"), "of an earlier run"
    )


def test_a_run_that_moves_is_left_alone(tmp_path):
    places, store, messages = Places(), HashStore(), []
    with watched(Lookout(places, lambda: store, 0, 1, 1.0), 0, tmp_path / "hang", lambda *said: messages.append(said)):
        for _ in range(15):
            places.advance()
            time.sleep(0.1)
    assert messages == []
    assert not (tmp_path / "hang").exists()
    assert all(thread.name != "exgrpo-hang-watch" for thread in threading.enumerate())
