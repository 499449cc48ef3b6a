"""Read a server's Prometheus metrics in a test."""

from prometheus_client.parser import text_string_to_metric_families


def samples(server):
    """Return every sample by its name and labels."""
    answer = server.http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    read = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in read}


def outcomes(server, model="fake"):
    return {
        key[2]: value for key, value in samples(server).items() if key[:2] == ("zoo_requests_total", model)
    }
