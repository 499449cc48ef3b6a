"""The options for operators in a complete `zoo serve`: JSON log lines, private metrics and traces."""

import http.server
import json
import threading

import pytest

from tests.attack.target import Target

KEY = {"authorization": "Bearer sk-operator"}


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.posted.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_server_logs_json_protects_its_metrics_and_sends_traces(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.posted = []
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{collector.server_port}"
        options = ["--log", "json", "--otel", "--private-metrics"]
        variables = {"ZOO_API_KEY": KEY["authorization"].split()[1], "OTEL_EXPORTER_OTLP_ENDPOINT": address}
        with Target("tiny", tmp_path, *options, OTEL_EXPORTER_OTLP_COMPRESSION="none", **variables) as target:
            assert target.http.get("/metrics").status_code == 401
            assert "zoo_ready 1.0" in target.http.get("/metrics", headers=KEY).text
            target.http.headers.update(KEY)
            answer = target.speak(voice="vivian", seed=1)
            assert answer.status_code == 200
        collector.shutdown()
    lines = [json.loads(line) for line in target.lines]
    [speech] = [line for line in lines if line["event"] == "speech"]
    assert speech["id"] == answer.headers["x-request-id"]
    assert (speech["voice"], speech["frames"], speech["reason"]) == ("vivian", 2, "length")
    assert {line["process"] for line in lines} >= {"supervisor", "http"}
    sent = b"".join(collector.posted)
    assert (
        b"POST /v1/audio/speech" in sent
        and b"generate_content tiny" in sent
        and answer.headers["x-request-id"].encode() in sent
    )
