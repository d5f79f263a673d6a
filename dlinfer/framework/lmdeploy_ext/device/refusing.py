"""The error for what is asked for and not served on the device in use."""

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation


def refuse(feature: str, advice: str, device_type: str | None = None) -> UnsupportedFeatureError:
    """The error for a feature that is asked for and not served, on the device in use where none is named."""
    named = device_type or activation.active()
    where = f"device_type {named!r}" if named else "a device of dlinfer's"
    return UnsupportedFeatureError(feature=feature, where=where, advice=advice)
