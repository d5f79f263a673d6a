"""Every error that a user can meet. Each kind of mistake has its own class, with a message and the likely fix.

A class declares two format strings, ``message`` and ``next_step``. The keywords of the ``raise`` fill both, as in
``raise OpCallError(op="rms_norm", schema=..., detail=...)``. A keyword ``advice`` replaces ``next_step``. The error has
the keywords as ``error.fields`` and the filled texts as ``error.explanation`` and ``error.step``. It can be pickled.
"""

from typing import Any


class DlinferError(Exception):
    """Base class of dlinfer's errors. An error's traceback ends with the error's place in docs/reference/errors.md."""

    message = "{detail}"
    next_step = ""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.explanation = self.message.format(**fields)
        self.step = fields.get("advice") or self.next_step.format(**fields)
        super().__init__(f"{self.explanation} Next step: {self.step}" if self.step else self.explanation)
        if type(self).__module__.startswith("dlinfer."):
            self.add_note(f"See docs/reference/errors.md#{type(self).__name__.lower()}")

    def again(self) -> "DlinferError":
        """Return a copy of this error to raise. A kept error that is raised itself would keep its traceback alive."""
        new = _rebuild(type(self), self.fields)
        new.__cause__ = self.__cause__
        return new

    def __reduce__(self):
        return _rebuild, (type(self), self.fields)


def _rebuild(cls: type[DlinferError], fields: dict[str, Any]) -> DlinferError:
    return cls(**fields)


# --- settings


class SettingError(DlinferError, ValueError):
    """A ``DLINFER_*`` variable has a value that its setting does not take."""

    message = "{variable}={given!r} is not valid: expected {expected}."
    next_step = "correct the variable or unset it; `dlinfer doctor` lists all settings."


# --- ops


class OpArgumentError(DlinferError, ValueError):
    """A fused op was called with an argument of a dtype, shape, device or layout that the op does not take."""

    message = "dlinfer.ops.{op}: argument {argument}: expected {expected}, given {given}."


class OpCallError(DlinferError, TypeError):
    """torch refused a call of a fused op: an argument is missing or of another type, or a keyword is unknown."""

    message = "dlinfer.ops.{op}: the call does not match the op's signature {schema}: {detail}"


class KernelFailureError(DlinferError, RuntimeError):
    """A kernel failed while computing, although its arguments were right. Memory ran out, or the kernel has a fault."""

    message = "dlinfer.ops.{op} failed while computing: {detail}"
    next_step = (
        "if memory ran out, use a smaller batch or a smaller KV cache. Otherwise report the error with the output "
        "of `dlinfer doctor --json`."
    )


class UnsupportedFeatureError(DlinferError, NotImplementedError):
    """A feature is requested that dlinfer does not serve yet. The error is raised before work starts."""

    message = "{feature} is not supported by {where}."
    next_step = "{advice}"


# --- kernels and vendors


class KernelDeclined(DlinferError, NotImplementedError):
    """A vendor's kernel cannot serve a call: ``raise KernelDeclined("rows of 7")``, before it writes anything."""

    message = "{reason}"

    def __init__(self, reason: str) -> None:
        super().__init__(reason=reason)


class KernelRuleError(DlinferError, TypeError):
    """The rule of a vendor's kernel returned neither a reason for a refusal nor None."""

    message = "the rule {rule} of the kernel {kernel} returned {given}, not a reason as text or None."
    next_step = "return the reason as text if the kernel refuses the call, and None if it takes the call."


class KernelSignatureError(DlinferError, TypeError):
    """A vendor registers a kernel, or a rule for a kernel, with parameters that differ from the op's."""

    message = "vendor {vendor!r}: the {what} for {op!r} takes {given}, but the op passes {expected}."
    next_step = "declare the kernel and its rule with the op's parameter names, in the op's order."


class UnknownOpError(DlinferError, KeyError):
    """A vendor registers a kernel for an op that does not exist, or claims such an op."""

    message = "vendor {vendor!r} registers a kernel for {op!r}, but there is no such op. Known ops: {known}."

    def __str__(self) -> str:  # KeyError would show the message's repr
        return str(self.args[0])


class FallbackError(DlinferError, RuntimeError):
    """A call of a fused op would have run the slow reference, but the fallback policy is ``error``."""

    message = (
        "dlinfer.ops.{op} has no native kernel for this call on vendor {vendor!r}: {reason}. "
        "Call: {call}, from {caller}. The fallback policy is 'error'."
    )
    next_step = "set DLINFER_FALLBACK=warn to run the reference instead, or choose another vendor."


class ModuleFallbackError(DlinferError, RuntimeError):
    """An optimized module would have run its class's own forward, but the fallback policy is ``error``."""

    message = "{module} ({kind}) cannot run on dlinfer's ops: {reason}. The fallback policy is 'error'."
    next_step = "set DLINFER_FALLBACK=warn to run the class's own forward, or undo() the optimization."


class UnknownVendorError(DlinferError, ValueError):
    """A vendor or a device type was requested that no installed package provides."""

    message = "unknown vendor or device_type {name!r}. Available: {available}."
    next_step = "run `dlinfer doctor` to see every vendor with its state."


class VendorUnavailableError(DlinferError, RuntimeError):
    """A vendor exists, but its probe says that it cannot run here."""

    message = "vendor {vendor!r} is not available: {reason}."
    next_step = "{advice}"


class VendorClashError(DlinferError, RuntimeError):
    """Two packages provide vendors of the same name, or two vendors provide graph engines of the same name."""

    message = "{what} is claimed by both {first} and {second}."
    next_step = "uninstall one of them, or rename its entry point in the group dlinfer.vendors."


class VendorLoadError(DlinferError, RuntimeError):
    """A vendor's entry point cannot be loaded, or returns no Vendor."""

    message = "vendor {vendor!r} ({source}) cannot be loaded: {detail}."
    next_step = "install another release of the package or report this. As the package's author, correct it."


# --- toolchains


class UnknownToolchainError(DlinferError, ValueError):
    """A toolchain was requested that no installed vendor has."""

    message = "there is no toolchain {name!r}. Known toolchains: {known}."
    next_step = "run `dlinfer toolchain list` to see all toolchains."


class ToolchainMissingError(DlinferError, RuntimeError):
    """A toolchain is needed, but its environment is not installed."""

    message = "the toolchain {toolchain!r} cannot be used: {reason} ({folder})."
    next_step = "run `dlinfer toolchain install {toolchain}`. In a checkout, `make toolchains` installs all toolchains."


class ToolchainInterpreterError(DlinferError, RuntimeError):
    """A toolchain needs a certain version of CPython, and this machine has none."""

    message = "the toolchain {toolchain!r} needs CPython {version}, which was not found: {looked}."
    next_step = (
        "install CPython {version} with `uv python install {version}`, `pyenv install {version}` or `apt install "
        "python{version} python{version}-venv`, then try again."
    )


class ToolchainDiskError(DlinferError, OSError):
    """A toolchain needs more room than the disk of the cache folder has."""

    message = (
        "the toolchain {toolchain!r} needs {needed} of disk space during its installation, but {folder} has only "
        "{free} free."
    )
    next_step = "free disk space there, or set DLINFER_CACHE_DIR to a folder on another disk."


class ToolchainInstallError(DlinferError, RuntimeError):
    """A step in the installation of a toolchain failed. The incomplete environment is removed."""

    message = "the toolchain {toolchain!r} could not be installed: `{command}` failed: {detail}."
    next_step = "check that this machine reaches PyPI (pip's settings and proxies apply), then try again."


# --- frameworks


class PatchError(DlinferError, RuntimeError):
    """A patch does not match the framework's function in the installed version, and was not applied."""

    message = "the patch on {target} does not fit {package} {version}: {detail}."
    next_step = "install a tested version of {package} (see `dlinfer doctor`)."


class MemoryPlanError(DlinferError, RuntimeError):
    """The requested KV cache needs more memory than this process may use."""

    message = (
        "the KV cache does not fit: {asked} needs {blocks} blocks of {block_bytes}; "
        "available to this process: {available} ({limit})."
    )
    next_step = "{advice}"


class ModelMemoryError(DlinferError, RuntimeError):
    """A model needs more memory than this process may use, whatever the size of the KV cache."""

    message = "the model does not fit: it needs {needed}, but {free} are free for this process ({source})."
    next_step = (
        "give the process more memory, or lower max_prefill_token_num, max_batch_size, num_gpu_blocks or "
        "cache_max_entry_count. On a CPU, DLINFER_CPU_WEIGHTS=int8, int4 or bf12 packs weights as they load."
    )


class DeviceConflictError(DlinferError, RuntimeError):
    """A framework was asked for a second device type, but it can run on only one of the two in one process."""

    message = "{framework} already runs on device_type {active!r} in this process, so it cannot run on {given!r} too."
    next_step = "start a second process for the second device_type."


class DeviceWithoutVendorError(DlinferError, RuntimeError):
    """LMDeploy was asked for a device type such as ascend, and no installed package has the vendor of that name."""

    message = (
        "device_type {device!r} cannot be used: no installed package provides the vendor {device!r}. dlinfer "
        "itself has only the op interface for this device, no kernels and no graph runner."
    )
    next_step = (
        "install a package with the entry point {device!r} in the group {group} (`dlinfer doctor` lists installed "
        "vendors), or use device_type 'cpu'."
    )


class DeviceUnknownError(DlinferError, RuntimeError):
    """A serving framework was asked for a device that no installed vendor describes."""

    message = "no installed vendor describes device {device!r} to serving frameworks. Installed: {vendors}."
    next_step = "install or repair the vendor's package; `dlinfer doctor` shows why it is not available."


class ModelFolderError(DlinferError, ValueError):
    """A model folder cannot be served. It is missing, incomplete or corrupt."""

    message = "the model folder {path!r} cannot be served: {detail}."
    next_step = "{advice}"


class AdapterFolderError(DlinferError, ValueError):
    """A LoRA adapter cannot be served. It is missing, corrupt, for another model, or an extended LoRA."""

    message = "the LoRA adapter {name!r} ({path}) cannot be served: {detail}."
    next_step = "{advice}"


class AdapterChangeError(DlinferError, ValueError):
    """A running engine cannot load or unload a LoRA adapter. change: "load" or "unload"."""

    message = "cannot {change} the LoRA adapter {name!r}: {detail}."
    next_step = "{advice}"


class GenerationOptionError(DlinferError, ValueError):
    """A generation option has a value that cannot be served."""

    message = "{field}={given} is not valid: expected {expected}."
    next_step = "correct the field in the GenerationConfig or in the request."


class EngineStartError(DlinferError, RuntimeError):
    """A framework's engine process ended before it could serve."""

    message = "the engine process of {framework} ended while it was starting: {detail}."
    next_step = "look for the cause in the output of the engine process above."


class FrameworkSourceError(DlinferError, ValueError):
    """A folder is not a framework's source, or its source cannot be parsed."""

    message = "{folder} cannot be read as a framework's source: {detail}."
    next_step = "pass the package's folder, or the folder that holds it, such as an unpacked wheel."


# --- graphs


class CaptureError(DlinferError, RuntimeError):
    """A model cannot be captured as a graph. Unless the fallback policy is ``error``, the model runs eagerly."""

    message = "the model cannot be captured as a graph: {reason} (at {line})."
    next_step = "change that line, or run the model eagerly (DLINFER_FALLBACK=warn, or no torch.compile)."


class PassError(DlinferError, RuntimeError):
    """A graph pass left an invalid graph. This is a fault in dlinfer."""

    message = "the graph is not valid after {stage}: {detail}."
    next_step = (
        "report the error with the output of `dlinfer doctor --json`. Until it is fixed, switch the pass off with "
        "options={{'passes': {{'{stage}': False}}}}."
    )


class GraphRunError(DlinferError, RuntimeError):
    """A compiled graph failed while it ran. The model can still be used."""

    message = "{region} failed at node {node!r} ({op}), from {line}: {detail}."
    next_step = "if memory ran out, use a smaller batch; else report this with `dlinfer doctor --json`."


class CompileOptionError(DlinferError, ValueError):
    """An option of torch.compile(backend="dlinfer") or dlinfer.compile does not exist, or has an unknown value."""

    message = "option {option!r}: {given!r} is not valid. Expected {expected}."
    next_step = "see `dlinfer.graph.options.CompileOptions` for all options."


class EngineUnavailableError(DlinferError, RuntimeError):
    """No vendor provides the requested graph engine, or the engine cannot run here."""

    message = "graph engine {engine!r} is not available: {reason}. Available: {available}."
    next_step = "choose an available engine, or install what this engine needs (`dlinfer doctor` shows it)."


class EngineResultError(DlinferError, RuntimeError):
    """A graph engine returned a result whose dtype, sizes or device differ from the graph's. The result is dropped."""

    message = "graph engine {engine!r} returned {given} as result {index} of {region}, not {expected}."
    next_step = "choose another engine for this model, and report the error with the output of `dlinfer doctor --json`."


class KVLayoutChangedError(DlinferError, RuntimeError):
    """A compiled graph is called, but the active vendor's KV cache layout differs from the layout in the graph."""

    message = (
        "the graph was compiled for KV caches laid out as {made_for}, but vendor {vendor!r}, which is active for "
        "device {device!r} now, lays them out as {given}."
    )
    next_step = "compile the graph again, or activate the former vendor with dlinfer.vendor.use."


class TorchStateChangedError(DlinferError, RuntimeError):
    """A compiled graph is called while one of torch's process-wide settings differs from its value at compilation."""

    message = "the graph was compiled with {what} = {compiled_for}, but {what} = {given} now, which changes results."
    next_step = "restore the former value, or compile or load the graph again with the new value."


class InferenceOnlyError(DlinferError, RuntimeError):
    """A graph is compiled, or an optimized module is called, while torch records gradients."""

    message = "dlinfer is for inference only, but gradients are being recorded for {what}."
    next_step = "call the model under torch.no_grad() or torch.inference_mode()."


class ExplanationError(DlinferError, ValueError):
    """An explanation cannot be read, cannot be written in the requested file format, or has no model to run again."""

    message = "explanation: {detail}."
    next_step = "see docs/guides/debug.md."


class NotAFunctionError(DlinferError, RuntimeError):
    """A part of a graph cannot be functionalized, and its engine can express writes only as results."""

    message = "node {node} cannot be functionalized: {reason}."
    next_step = "use engine 'inductor', or use fallback 'warn' or 'allow' to run the region eagerly."


class NotExportableError(DlinferError, RuntimeError):
    """A node of a graph cannot be written as ONNX."""

    message = "node {node} ({op}) cannot be written as ONNX: {reason}."
    next_step = "use fallback 'warn' or 'allow' to run the node outside the engine, or use another engine."


class ProviderUnavailableError(DlinferError, RuntimeError):
    """The requested execution provider of ONNX Runtime cannot run here."""

    message = "ONNX Runtime has no execution provider {provider!r}: {reason}. Available: {available}."
    next_step = "install the onnxruntime package with this provider (onnxruntime-gpu, ...), or use another."


class ProviderFallbackError(DlinferError, RuntimeError):
    """An execution provider leaves nodes to ONNX Runtime's CPU provider, but the fallback policy is ``error``."""

    message = (
        "execution provider {provider} leaves {count} nodes to ONNX Runtime's CPU provider: {nodes}. "
        "The fallback policy is 'error'."
    )
    next_step = "add CPUExecutionProvider to engine_options['providers'], or use fallback 'warn' or 'allow'."


class GraphFallbackError(DlinferError, RuntimeError):
    """A part of a model would have run outside the graph engine, but the fallback policy is ``error``."""

    message = (
        "node {node!r} ({op}, {call}, from {line}) would run outside engine {engine!r}: {reason}. "
        "The fallback policy is 'error'."
    )
    next_step = "use fallback 'warn' or 'allow', or another engine."


class ArtifactInputError(DlinferError, ValueError):
    """A compiled artifact was called with an input that it was not compiled for."""

    message = "input {name!r} does not fit the artifact: expected {expected}, given {given}."
    next_step = "pass an input of that kind, or compile again with dynamic_shapes for sizes that change."


# --- artifacts


class ArtifactError(DlinferError, RuntimeError):
    """Base of the errors of artifact files; ``except ArtifactError`` catches them all."""

    message = "the artifact {source} cannot be used: {detail}."
    next_step = "write the artifact again with `artifact.save()`."


class ArtifactNotFoundError(ArtifactError, OSError):
    """An artifact's file does not exist, or cannot be read or written."""

    message = "the artifact {source} cannot be opened: {detail}."
    next_step = "check the path and its permissions."


class ArtifactCorruptError(ArtifactError, ValueError):
    """An artifact is truncated or altered, or has contents that ``save`` never writes.

    Nothing in the artifact was used.
    """

    message = "the artifact {source} cannot be read: {detail}."
    next_step = "copy the file again from its origin, or write it again with `artifact.save()`."


class ArtifactVersionError(ArtifactError):
    """An artifact has another version of the file format, or an op of another version than this dlinfer's."""

    message = "the artifact {source} needs {what} {wanted}, but this installation has {here}."
    next_step = "install the version that the artifact needs, or compile and save the artifact again here."


class ArtifactKeyError(ArtifactError, ValueError):
    """An encrypted artifact is opened without its key, or with a wrong key."""

    message = "the key for the artifact {source} cannot be used: {detail}."
    next_step = "pass the key that the artifact was saved with: dlinfer.load(path, key=...)."


class ArtifactStorageError(ArtifactError, ValueError):
    """A compiled graph holds something that cannot be stored in a file."""

    message = "{what} cannot be saved: {detail}."
    next_step = "correct this in the model or the call, or use the artifact in the process that compiled it."


# --- sessions


class SessionOptionError(DlinferError, ValueError):
    """An option of dlinfer.load or of a Session does not exist, has an unknown value, or is changed too late."""

    message = "option {option!r}: {given!r} is not valid. Expected {expected}."
    next_step = "see `dlinfer.runtime.options.SessionOptions` for all options."


class SessionCallError(DlinferError, ValueError):
    """A Session has no entry, input, output or tensor of the requested name, or cannot do what the call requests."""

    message = "{what} {name!r}: {detail}."
    next_step = "`session.get_graph_names()` lists entries, `session.signature(entry)` inputs and outputs."


class BatchCollectorError(DlinferError, ValueError):
    """A sample has other sizes or another dtype than a BatchCollector takes, or the collector has no free place."""

    message = "the batch collector of {dtype} {shape}: {detail}."
    next_step = "pass samples of the collector's dtype and sizes, and free() samples that were run."
