"""Reads how sentence-transformers computes a model's results from the JSON files of a folder.

- ``modules.json`` lists the modules that run one after another, and their folders.
- ``sentence_bert_config.json`` says how texts are tokenised, ``1_Pooling/config.json`` how tokens become one vector.
- ``config_sentence_transformers.json`` holds the prompts, and the activation of a reranker.

A field that would change results and that nobody reads here is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from dlinfer.embedding.errors import EmbeddingFolderError
from dlinfer.embedding.folder import Task, read_dict, read_json, task_of

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")

# Field of files before sentence-transformers 5 -> the pooling. The order is that of concatenated vectors.
_OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

_TOKENISING_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_READ = {"max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name"}
_WITHOUT_EFFECT = {"unpad_inputs", "query_length", "document_length"}
_ARGUMENTS = {
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
}
_ARGUMENTS_WITHOUT_EFFECT = {"attn_implementation", "dtype", "torch_dtype", "trust_remote_code"}
_TASKS = {
    "feature-extraction": ("embed", "last_hidden_state"),
    "sequence-classification": ("rerank", "logits"),
    "text-generation": ("rerank", "logits"),
}
"""Field ``transformer_task`` -> (the task, the output of the model that is read)."""


@dataclass(frozen=True)
class Recipe:
    """How texts or pairs of texts become results.

    task: "embed" or "rerank". transformer: the folder of the weights and the tokenizer.
    poolings: names of POOLINGS, whose vectors are concatenated. include_prompt: whether the prompt's tokens are pooled.
    steps: (kind, folder) of each module after the pooling. The kind is "Dense" or "Normalize".
    max_length: longer texts are cut to this number of tokens. None: the model's own limit.
    prompts: name -> text that is put in front. default_prompt: the name that is used if a call names none.
    truncate_dim: how many numbers of a vector are kept. None: all.
    activation: the path of the class that turns a logit into a score. None: the sigmoid.
    answers: token ids of "relevant" and "not relevant"; the score is the difference of their logits. The second may be
        None. answers itself is None if the model has a classification head.
    wording: how the texts of a pair are joined. "plain": by the tokenizer. "flat" and "structured": by its chat
        template, as the roles query and document; the words are the two forms of a message's content. "card": as on the
        card of Qwen3-Reranker.
    """

    task: Task
    transformer: Path
    poolings: tuple[str, ...] = ()
    include_prompt: bool = True
    steps: tuple[tuple[str, Path], ...] = ()
    max_length: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    truncate_dim: int | None = None
    activation: str | None = None
    answers: tuple[int, int | None] | None = None
    wording: str = "plain"

    @property
    def normalizes(self) -> bool:
        """Whether vectors have the length 1."""
        return bool(self.steps) and self.steps[-1][0] == "Normalize"


def read_recipe(folder: Path, task: Task | None = None, pooling: str | None = None) -> Recipe:
    """Read a folder's recipe.

    task: needed where the files do not say it. pooling: one of POOLINGS, needed where no file names one; it replaces
    the one in the files.

    Raises EmbeddingFolderError if the files say too little, contradict ``task``, or need what is not served.
    """
    known = task_of(folder)
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        _refuse(folder, "it has no config.json", "name the folder of a model, as transformers saves it.")
    if known is None and task is None:
        _refuse(
            folder,
            "its files describe a model that generates text",
            "pass the task embed or rerank (`--task`) if it is one of these, or serve it with LMDeploy.",
        )
    if pooling is not None and pooling not in POOLINGS:
        _refuse(folder, f"there is no pooling {pooling!r}", f"choose one of {', '.join(POOLINGS)}.")
    chosen: Task = task or known or "embed"
    general = read_dict(folder / "config_sentence_transformers.json")
    kind = general.get("model_type") or "SentenceTransformer"
    if kind not in ("SentenceTransformer", "CrossEncoder"):
        _refuse(folder, f"models of the type {kind} are not served", "use sentence-transformers itself.")
    if general.get("keep_in_fp32_modules"):
        _refuse(folder, "keep_in_fp32_modules is not served", "use sentence-transformers itself.")
    modules = read_json(folder / "modules.json")
    recipe = Recipe(chosen, folder) if not modules else _modules(folder, chosen, modules)
    if chosen == "embed":
        poolings = (pooling,) if pooling else recipe.poolings
        if not poolings:
            _refuse(
                folder,
                "no file names its pooling",
                f"pass pooling (`--pooling`), one of {', '.join(POOLINGS)}; the model's card names it.",
            )
        recipe = replace(recipe, poolings=poolings)
    config = read_dict(recipe.transformer / "config.json")
    activation = (
        general.get("activation_fn")
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    prompts = {str(name): text or "" for name, text in (general.get("prompts") or {}).items()}
    default = general.get("default_prompt_name")
    if default is not None and default not in prompts:
        _refuse(folder, f"its default prompt {default!r} is not among its prompts", "correct the file.")
    return replace(
        recipe,
        prompts=prompts,
        default_prompt=default,
        truncate_dim=general.get("truncate_dim"),
        activation=activation,
    )


def _modules(folder: Path, task: Task, modules: Iterable[dict[str, Any]]) -> Recipe:
    recipe = Recipe(task, folder)
    transformers = 0
    for module in modules:
        path = folder / str(module.get("path", ""))
        package, _, kind = str(module.get("type", "")).rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            _refuse(folder, f"its module {module.get('type')} is code of others", "use a model without it.")
        if not path.resolve().is_relative_to(folder.resolve()):
            _refuse(folder, f"its module {kind} is outside the folder", "correct modules.json.")
        if kind == "Transformer":
            transformers += 1
            recipe = _tokenising(replace(recipe, transformer=path), folder)
        elif kind == "Pooling" and not recipe.poolings:
            recipe = _pooling(recipe, read_dict(path / "config.json"), folder)
        elif kind in ("Dense", "Normalize") and recipe.poolings:
            recipe = replace(recipe, steps=(*recipe.steps, (kind, path)))
        elif kind == "LogitScore" and task == "rerank":
            config = read_dict(path / "config.json")
            recipe = replace(recipe, answers=(int(config["true_token_id"]), config.get("false_token_id")))
        else:
            _refuse(
                folder, f"its module {kind} is not served at this place", "use sentence-transformers itself."
            )
    if transformers != 1:
        _refuse(folder, "modules.json has not exactly one Transformer", "use sentence-transformers itself.")
    return recipe


def _tokenising(recipe: Recipe, folder: Path) -> Recipe:
    config: dict[str, Any] = {}
    for name in _TOKENISING_FILES:
        config = config or read_dict(recipe.transformer / name)
    unread = {name for name, value in config.items() if value} - _READ - _WITHOUT_EFFECT - _ARGUMENTS
    unread.update(*(config.get(name) or () for name in _ARGUMENTS))
    unread -= _ARGUMENTS_WITHOUT_EFFECT
    if unread:
        _refuse(folder, f"{', '.join(sorted(unread))} is not served", "use sentence-transformers itself.")
    default = "feature-extraction" if recipe.task == "embed" else "sequence-classification"
    task, output = _TASKS.get(config.get("transformer_task", default), ("", ""))
    if task != recipe.task:
        _refuse(
            folder,
            f"its transformer_task {config.get('transformer_task', default)} does not fit {recipe.task}",
            "leave the task out.",
        )
    modalities = config.get("modality_config") or {}
    for way in modalities.values():
        if way.get("method") != "forward" or way.get("method_output_name") not in (output, [output]):
            _refuse(folder, f"its modality_config {way} is not served", "use sentence-transformers itself.")
    wording = "plain"
    if "message" in modalities:
        wording = str(modalities["message"].get("format") or "flat")
        if recipe.task == "embed" or wording not in ("flat", "structured"):
            _refuse(folder, "its texts go through a chat template", "use sentence-transformers itself.")
    return replace(
        recipe,
        max_length=config.get("max_seq_length"),
        lower_case=bool(config.get("do_lower_case")),
        wording=wording,
    )


def _pooling(recipe: Recipe, config: dict[str, Any], folder: Path) -> Recipe:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in _OLD_POOLINGS.items() if config.get(name)] or ["mean"]
    poolings = (modes,) if isinstance(modes, str) else tuple(modes)
    if unknown := [mode for mode in poolings if mode not in POOLINGS]:
        _refuse(folder, f"its pooling {unknown[0]} is not known", "use sentence-transformers itself.")
    return replace(recipe, poolings=poolings, include_prompt=bool(config.get("include_prompt", True)))


def _refuse(folder: Path, reason: str, advice: str) -> NoReturn:
    raise EmbeddingFolderError(folder=folder, reason=reason, advice=advice)
