"""JSON lines in, JSON lines out: each line answered once, whatever is in it and however often a run is interrupted."""

import fcntl
import json

import pytest

from pagedjax.config import Config
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.generate import Job, resume
from pagedjax.options import with_overrides
from pagedjax.types import CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from pagedjax.weights import LoadedModel
from tests.server.fakes import TOKENIZER


class ScriptedEngine:
    """Answers each request with its prompt in capitals, a character a step, the shortest first."""

    def __init__(self, fail_at_step=None):
        self.config = with_overrides(Config(), {"scheduler.max_num_seqs": 2})
        self.loaded = LoadedModel(None, None, TOKENIZER, "fake")
        self.running = {}
        self.most = 0
        self.seen = []
        self.steps_left = fail_at_step

    def add_request(self, request):
        if len(request.prompt_ids) > 100:
            raise InvalidRequestError("prompt", "too long")
        text = TOKENIZER.decode(request.prompt_ids).upper()
        self.seen.append(request)
        self.running[request.request_id] = [request, text[: request.sampling.max_tokens or 99], 0]
        self.most = max(self.most, sum(r.sampling.n for r, _, _ in self.running.values()))

    def has_unfinished(self):
        return bool(self.running)

    def abort(self, request_id):
        self.running.pop(request_id)

    def step(self):
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise KeyboardInterrupt
        out = []
        for request_id, (request, text, position) in list(self.running.items()):
            end = position + 1 >= len(text)
            entry = [TokenLogprobs(Logprob(1, float("-inf")))] if request.sampling.logprobs is not None else None
            reason = FinishReason.STOP if end else None
            outputs = [
                CompletionOutput(i, text[position : position + 1], [position], entry, reason)
                for i in range(request.sampling.n)
            ]
            out.append(
                RequestOutput(
                    request_id, request.prompt_ids, outputs, end, num_generated_tokens=(position + 1) * len(outputs)
                )
            )
            self.running[request_id][2] += 1
            if end:
                del self.running[request_id]
        return out


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def run(files, engine=None, defaults=None):
    counts = Job(engine or ScriptedEngine(), defaults, progress=False).run(str(files[0]), str(files[1]))
    return counts, read(files[1])


def read(path):
    """Index -> record; each index once."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({r["index"] for r in records}) == len(records)
    return {r["index"]: r for r in records}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" if not isinstance(line, str) else line + "\n" for line in lines))


@pytest.mark.smoke
def test_texts_ids_conversations_and_batch_lines(files):
    write(
        files[0],
        [
            {"prompt": "abc", "custom_id": "first"},
            {"prompt": TOKENIZER.encode("de"), "n": 2},
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30},
            {
                "custom_id": "b",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "m", "prompt": "xyz", "max_tokens": 2},
            },
        ],
    )
    counts, records = run(files)
    assert counts["lines"] == 4
    assert counts["errors"] == 0
    assert records[0]["custom_id"] == "first"
    assert records[0]["outputs"] == [{"text": "ABC", "token_ids": [0, 1, 2], "finish_reason": "stop"}]
    assert records[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
    assert [o["text"] for o in records[1]["outputs"]] == ["DE", "DE"]
    assert records[2]["outputs"][0]["text"].startswith("<|IM_START|>USER\nHI")
    assert records[3]["custom_id"] == "b"
    assert records[3]["outputs"][0]["text"] == "XY"


def test_defaults_and_their_overrides(files):
    write(
        files[0],
        [
            {"prompt": "a"},
            {"prompt": "a", "temperature": 0.5, "max_completion_tokens": 3},
            {"messages": [{"role": "user", "content": "a"}]},
        ],
    )
    engine = ScriptedEngine()
    run(files, engine)
    assert [r.sampling.max_tokens for r in engine.seen] == [16, 3, None]
    engine, target = ScriptedEngine(), files[0].parent / "other.jsonl"
    run((files[0], target), engine, {"temperature": 0.0, "max_tokens": 7})
    assert [(r.sampling.temperature, r.sampling.max_tokens) for r in engine.seen] == [(0.0, 7), (0.5, 3), (0.0, 7)]


BAD = {
    "{": "not JSON",
    "[1]": "must be a JSON object",
    "{}": "give either prompt or messages",
    '{"prompt": "a", "messages": []}': "give either prompt or messages",
    '{"prompt": 5}': "must be a text or a list of token ids",
    '{"prompt": "a", "temprature": 1}': "did you mean temperature",
    '{"prompt": "a", "temperature": 3}': "temperature: must be in [0, 2]",
    '{"prompt": "a", "temperature": NaN}': "temperature",
    '{"prompt": "a", "stop": [""]}': "stop: an empty stop string",
    '{"prompt": "a", "cache_salt": 5}': "cache_salt",
    '{"messages": "hi"}': "messages: must be a list",
    '{"messages": []}': "messages: must be a list",
    '{"prompt": "' + "x" * 101 + '"}': "too long",
    '{"prompt": "\\ud800"}': "cannot be encoded",
    "[" * 50_000: "not JSON",
}


def test_bad_lines_become_errors_and_stop_nothing(files):
    write(files[0], [*BAD, {"prompt": "ok"}])
    files[0].write_bytes(files[0].read_bytes() + b"\xff\xfe\n")
    counts, records = run(files)
    assert counts["errors"] == len(BAD) + 1
    for index, message in enumerate(BAD.values()):
        assert message in records[index]["error"]["message"]
        assert records[index]["error"]["line"] == index + 1
    assert records[len(BAD)]["outputs"][0]["text"] == "OK"
    assert "not JSON" in records[len(BAD) + 1]["error"]["message"]


def test_an_interrupted_run_goes_on_where_it_ended(files):
    lines = [{"prompt": "abcdefgh"[: 1 + i % 8]} for i in range(30)]
    write(files[0], lines)
    seen = 0
    for _ in range(20):
        engine = ScriptedEngine(fail_at_step=12)
        try:
            run(files, engine)
        except KeyboardInterrupt:
            assert not engine.running, "aborted, so that its pages come back"
            assert len(read(files[1])) > seen, "something was done"
            seen = len(read(files[1]))
            with files[1].open("ab") as file:  # a torn last line, as after a power cut
                file.write(b'{"index": 29, "input_ha')
        else:
            break
    records = read(files[1])
    assert sorted(records) == list(range(30))
    for index, record in records.items():
        assert record["outputs"][0]["text"] == lines[index]["prompt"].upper()
    engine = ScriptedEngine()
    counts, _ = run(files, engine)
    assert counts["skipped"] == 30
    assert not engine.seen


def test_the_engine_is_kept_supplied_but_not_flooded(files):
    write(files[0], [{"prompt": "abc"}] * 50)
    engine = ScriptedEngine()
    run(files, engine)
    assert engine.most == 4


def test_a_whole_last_line_without_its_end_is_kept(files):
    write(files[0], [{"prompt": "a"}, {"prompt": "b"}])
    run(files)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    counts, records = run(files)
    assert counts["skipped"] == 2
    assert sorted(records) == [0, 1]


def test_an_output_of_another_input_is_refused(files):
    write(files[0], [{"prompt": "a"}, {"prompt": "b"}])
    run(files)
    write(files[0], [{"prompt": "a"}, {"prompt": "c"}])
    with pytest.raises(ConfigError, match="line 2 or --sampling has changed"):
        run(files)
    write(files[0], [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ConfigError, match="line 1 or --sampling has changed"):
        run(files, defaults={"seed": 3})
    assert run(files)[0]["skipped"] == 2


def test_an_output_that_another_run_writes_is_refused(files):
    write(files[0], [{"prompt": "a"}])
    with open(files[1], "ab") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run is writing to it"):
            run(files)
    assert run(files)[0]["lines"] == 1


def test_a_file_that_is_something_else_is_left_alone(files):
    write(files[0], [{"prompt": "a"}])
    files[1].write_text('{"something": "else"}\n')
    with pytest.raises(ConfigError, match="line 1 was not written by this tool"):
        resume(str(files[1]))
    assert files[1].read_text() == '{"something": "else"}\n'


def test_blank_lines_are_no_lines(files):
    write(files[0], ["", {"prompt": "a"}, "   ", {"prompt": "b"}, ""])
    counts, records = run(files)
    assert counts["lines"] == 2
    assert sorted(records) == [1, 3]


def test_logprobs_are_json(files):
    write(
        files[0],
        [
            {"prompt": "a", "logprobs": 1},
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
        ],
    )
    engine = ScriptedEngine()
    _, records = run(files, engine)
    assert records[0]["outputs"][0]["logprobs"][0]["logprob"] == -9999.0
    assert [r.sampling.logprobs for r in engine.seen] == [1, 2]


def test_files_that_cannot_be_opened(files):
    with pytest.raises(ConfigError, match="No such file"):
        run(files)
    write(files[0], [{"prompt": "a"}])
    with pytest.raises(ConfigError, match="absent"):
        run((files[0], files[0].parent / "absent" / "out.jsonl"))
