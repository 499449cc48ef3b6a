"""Earlier answers in the HTTP process."""

import pytest
from litestar.exceptions import HTTPException

from serving import protocol
from serving.http.answers import ANSWER_S, Answer, Answers

ANSWER = Answer.of(protocol.Answer(tokens=[5, 6, 107, 108, 7, 109], ends=[3, 4, 6]))


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_an_answer_is_found_for_an_hour_by_its_id_and_model():
    clock = Clock()
    answers = Answers(clock)
    answers.keep("audio_1", "glm", ANSWER)
    assert answers.find("audio_1", "glm", "messages[1]") is ANSWER
    clock.now_s = ANSWER_S
    assert answers.find("audio_1", "glm", "messages[1]") is ANSWER
    for id, model in (("audio_2", "glm"), ("audio_1", "other")):
        with pytest.raises(HTTPException, match="has not made in the last hour"):
            answers.find(id, model, "messages[1]")
    clock.now_s += 1
    with pytest.raises(HTTPException, match=r"messages\[1\] names the audio 'audio_1'"):
        answers.find("audio_1", "glm", "messages[1]")


def test_memory_is_bounded_and_old_answers_go_first():
    clock = Clock()
    answers = Answers(clock, max_bytes=2 * ANSWER.num_bytes)
    for i in range(3):
        answers.keep(f"audio_{i}", "glm", ANSWER)
    assert answers.num_bytes == 2 * ANSWER.num_bytes
    with pytest.raises(HTTPException):
        answers.find("audio_0", "glm", "messages[1]")
    assert answers.find("audio_1", "glm", "messages[1]") is ANSWER
    clock.now_s = ANSWER_S + 1
    answers.keep("audio_3", "glm", ANSWER)
    assert answers.num_bytes == ANSWER.num_bytes


@pytest.mark.parametrize(("frames", "num_tokens"), [(0, 0), (1, 3), (2, 4), (3, 6), (9, 6)])
def test_what_was_heard_ends_with_a_frame_and_has_the_text_before_it(frames, num_tokens):
    heard = ANSWER.up_to(frames)
    assert heard.turn().tokens == tuple(ANSWER.tokens)[:num_tokens]
    assert len(heard.ends) == min(frames, 3)
