"""The text that ``print_metrics`` prints, in eleven lines."""

from collections.abc import Mapping
from typing import Any

RANKS = {"P25": "25%", "P50": "50%", "P75": "75%", "P90": "90%", "P99": "99%"}


def text(metrics: Mapping[str, Any]) -> str:
    """Return the metrics in the words and order of Qualcomm's sample output.

    As in the sample, the average comes twice and P999 is missing.
    """
    average = f"Average latency / inference time observed is {metrics['avg_latency']} s"
    return "\n".join(
        [
            f"Number of inferences utilized for calculation are {metrics['num_of_inferences']}",
            f"Minimum latency observed {metrics['min_latency']} s",
            f"Maximum latency observed {metrics['max_latency']} s",
            average,
            *(
                f"{rank} / {share} of inferences observed latency less than {metrics[rank]} s"
                for rank, share in RANKS.items()
            ),
            f"Sum of all the inference times {metrics['total_inference_time']} s",
            average,
        ]
    )
