"""Counters of several replicas in one answer."""

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from dlinfer.serve.metrics import merge

ANSWER = """\
# HELP lmdeploy:num_requests_running Number of requests in model execution batches.
# TYPE lmdeploy:num_requests_running gauge
lmdeploy:num_requests_running{{engine="0",model_name="tiny"}} {running}
# HELP lmdeploy:prompt_tokens_total Number of prefill tokens processed.
# TYPE lmdeploy:prompt_tokens_total counter
lmdeploy:prompt_tokens_total{{engine="0"}} 7.0
# HELP lmdeploy:e2e Seconds.
# TYPE lmdeploy:e2e histogram
lmdeploy:e2e_bucket{{le="+Inf"}} 1.0
lmdeploy:e2e_count 1.0
lmdeploy:e2e_sum 2.0
"""


def test_each_sample_names_its_replica():
    own = Metric("dlinfer:replicas_ready", "Replicas that get requests.", "gauge")
    own.add_sample(own.name, {}, 2)
    text = merge({"0": ANSWER.format(running=3.0), "10.0.0.2:80": ANSWER.format(running=4.0)}, [own])
    samples = {
        (sample.name, sample.labels.get("replica")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples == {
        ("lmdeploy:num_requests_running", "0"): 3,
        ("lmdeploy:num_requests_running", "10.0.0.2:80"): 4,
        **{("lmdeploy:prompt_tokens_total", replica): 7 for replica in ("0", "10.0.0.2:80")},
        **{("lmdeploy:e2e_bucket", replica): 1 for replica in ("0", "10.0.0.2:80")},
        **{("lmdeploy:e2e_count", replica): 1 for replica in ("0", "10.0.0.2:80")},
        **{("lmdeploy:e2e_sum", replica): 2 for replica in ("0", "10.0.0.2:80")},
        ("dlinfer:replicas_ready", None): 2,
    }
    assert text.count("# TYPE lmdeploy:num_requests_running gauge") == 1


def test_without_replicas():
    assert merge({}) == ""
