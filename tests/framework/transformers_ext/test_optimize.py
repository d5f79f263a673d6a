"""``dlinfer.transformers.optimize``: what is swapped, what it computes, and the way back."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

import dlinfer
from dlinfer import settings
from dlinfer.errors import InferenceOnlyError, ModuleFallbackError
from dlinfer.framework.transformers_ext import optimize
from dlinfer.ops.core import fallback
from dlinfer.ops.core.fallback import FallbackWarning

IDS = torch.tensor([[5, 9, 3, 77, 12], [8, 1, 4, 6, 50]])
SWAPPED = {
    "llama": {"LlamaMLP": "linears silu_mul", "LlamaRMSNorm": "rms_norm", "Linear": "linear"},
    "gemma2": {"Gemma2MLP": "gelu_mul linears", "Gemma2RMSNorm": "rms_norm", "Linear": "linear"},
    "phi3": {"Phi3MLP": "silu_and_mul", "Phi3RMSNorm": "rms_norm", "Linear": "linear"},
    "cohere": {"CohereMLP": "linears silu_mul", "CohereLayerNorm": "rms_norm", "Linear": "linear"},
    "mixtral": {"MixtralExperts": "fused_moe", "MixtralRMSNorm": "rms_norm", "Linear": "linear"},
    "qwen3-moe": {"Qwen3MoeExperts": "fused_moe", "Qwen3MoeRMSNorm": "rms_norm", "Linear": "linear"},
    "gpt-oss": {"GptOssRMSNorm": "rms_norm", "Linear": "linear"},
}


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def tokens(model):
    return model.generate(IDS[:1], max_new_tokens=8, do_sample=False)[0].tolist()


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_modules_compute_what_their_classes_do(model_of, name):
    model = model_of(name)
    state, wanted, generated = model.state_dict(), logits(model), tokens(model)
    done = optimize(model)
    assert {one.module: " ".join(one.ops) for one in done.swapped} == SWAPPED[name]
    assert all("forward" in model.get_submodule(one.name).__dict__ for one in done.swapped)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)
    assert tokens(model) == generated
    assert {name: one.data_ptr() for name, one in model.state_dict().items()} == {
        name: one.data_ptr() for name, one in state.items()
    }


def ops_called(model):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.counts = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "dlinfer":
                self.counts[func._schema.name.removeprefix("dlinfer::")] += 1
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        logits(model)
    return dict(mode.counts)


def test_the_ops_are_called_and_after_undo_they_are_not(model_of):
    model = model_of("llama")
    wanted = logits(model)
    done = optimize(model)
    assert ops_called(model) == {"rms_norm": 5, "linears": 2, "silu_mul": 2, "linear": 9}
    done.undo()
    assert ops_called(model) == {}
    assert torch.equal(logits(model), wanted)
    done.undo()
    assert len(optimize(model).swapped) == 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(model_of, dtype):
    """Within what 16 bits hold, of the largest number."""
    exact = logits(model_of("llama"))
    model = model_of("llama", dtype)
    before = (logits(model) - exact).abs().max()
    optimize(model)
    assert (logits(model) - exact).abs().max() <= 1.5 * before


def test_every_shape_of_input(model_of):
    """One token, an empty batch, a prompt without a batch, views with strides."""
    model = model_of("llama")
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    given = [torch.randn(1, 1, 64), torch.randn(0, 4, 64), torch.randn(7, 64), torch.randn(2, 64, 6).mT]
    given += [torch.randn(2, 3, 4, 64)[:, ::2], torch.randn(64), torch.randn(2, 2, 2, 2, 64)]
    with torch.no_grad():
        wanted = [(mlp(x), norm(x)) for x in given]
        optimize(model)
        for x, (one, other) in zip(given, wanted, strict=True):
            torch.testing.assert_close(mlp(x), one)
            torch.testing.assert_close(norm(hidden_states=x), other)


@pytest.mark.usefixtures("graph_mode")
def test_in_graph_mode(model_of):
    model = model_of("qwen3")
    model.model.layers = model.model.layers[:1]
    wanted = logits(model)
    optimize(model)
    compiled = torch.compile(model, backend="dlinfer", fullgraph=True, dynamic=True)
    for ids in (IDS, IDS[:, :3]):
        torch.testing.assert_close(logits(compiled, ids), logits(model, ids), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(compiled), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_are_refused_by_name(model_of):
    model = model_of("llama")
    optimize(model)
    with pytest.raises(InferenceOnlyError, match=r"layers\.0\.input_layernorm"):
        model(IDS)
    with torch.inference_mode():
        model(IDS)
    model.requires_grad_(False)
    model(IDS)


def test_training_autocast_and_other_dtypes_are_the_class_s_own(model_of):
    model = model_of("llama")
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    x = torch.randn(2, 3, 64)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cast = mlp(x)
    half = norm(x.bfloat16())
    optimize(model)
    assert norm(x.bfloat16()).dtype is half.dtype
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(mlp(x), cast)
    model.train()
    model(IDS).logits.sum().backward()
    assert model.model.norm.weight.grad is not None


def fallbacks():
    return {
        (one.op, one.reason): count
        for one, count in fallback.counts().items()
        if one.vendor == "transformers"
    }


def test_calls_of_a_class_s_own_forward_are_counted_and_said_once(model_of):
    model = model_of("llama")
    optimize(model)
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    fallback.reset()
    with torch.no_grad():
        norm(torch.randn(2, 64))
        assert not fallbacks()
        with pytest.warns(FallbackWarning, match=r"model\.norm \(LlamaRMSNorm\) .* 1 dimensions"):
            norm(torch.randn(64))
        norm(torch.randn(64))
        with pytest.warns(
            FallbackWarning, match="its input is torch.bfloat16, but its weights are torch.float32"
        ):
            norm(torch.randn(2, 64).bfloat16())
        mlp.train()
        with pytest.warns(FallbackWarning, match=r"layers\.0\.mlp \(LlamaMLP\) .* it is in training"):
            mlp(torch.randn(2, 64))
    assert fallbacks() == {
        ("LlamaRMSNorm", "its input has 1 dimensions"): 2,
        ("LlamaRMSNorm", "its input is torch.bfloat16, but its weights are torch.float32"): 1,
        ("LlamaMLP", "it is in training mode"): 1,
    }


def test_the_policy_error_refuses_a_class_s_own_forward(model_of):
    model = model_of("mixtral")
    optimize(model)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad(), settings.override(fallback="error"):
        with pytest.raises(ModuleFallbackError, match=r"model\.norm .* 1 dimensions"):
            model.model.norm(torch.randn(64))
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ModuleFallbackError, match="autocast is on"),
        ):
            model.model.norm(torch.randn(2, 64))
        experts.train()
        with pytest.raises(
            ModuleFallbackError, match=r"layers\.0\.mlp\.experts \(MixtralExperts\).*in training"
        ):
            experts(torch.randn(2, 64), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))


def test_a_layer_that_is_put_into_a_swapped_module_is_called(model_of):
    """As adapters are."""
    model = model_of("llama")
    optimize(model)
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        before = mlp(x)
        mlp.up_proj = nn.Sequential(mlp.up_proj, nn.Tanh())
        wanted = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
        assert torch.equal(mlp(x), wanted)
        assert not torch.equal(wanted, before)


def test_weights_that_are_written_or_replaced_later_are_used(model_of):
    model = model_of("llama")
    optimize(model)
    other = model_of("llama")
    with torch.no_grad():
        for one in (model, other):
            one.model.norm.weight.mul_(2)
            one.model.layers[0].mlp.down_proj.weight = nn.Parameter(torch.ones(64, 96))
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_its_own_weights(model_of, copied):
    model = model_of("llama")
    optimize(model)
    other = copied(model)
    torch.testing.assert_close(logits(other), logits(model))
    with torch.no_grad():
        other.model.norm.weight.zero_()
    assert logits(other).abs().max() == 0
    assert logits(model).abs().max() > 0
    assert ops_called(other) == ops_called(model)


def test_what_is_kept_and_why(model_of):
    model = model_of("gpt-oss")
    reasons = {one.module: one.reason for one in optimize(model).kept}
    assert reasons["GptOssExperts"] == "its experts' weights do not stack gate above up"
    model = model_of("llama")
    model.model.norm.register_forward_hook(lambda *given: None)
    model.model.layers[0].mlp.forward = lambda x: x
    done = optimize(model)
    assert {one.name: one.reason for one in done.kept} == {
        "model.norm": "it has hooks",
        "model.layers.0.mlp": "its forward was replaced by other code",
    }
    assert "4 x LlamaRMSNorm: rms_norm" in str(done)
    again = optimize(model)
    assert not again.swapped
    assert {one.reason for one in again.kept if one.name == "model.layers.1.mlp"} == {
        "it already runs on dlinfer's ops"
    }


class DependsOnSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return scaled if x.shape[0] > 2 else scaled * 2


class ReadsNumbers(DependsOnSizes):
    def forward(self, x):
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return scaled if x.sum() > 0 else scaled * 2


class Draws(DependsOnSizes):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight + torch.rand(8)


@pytest.mark.parametrize("kind", [DependsOnSizes, ReadsNumbers])
def test_what_depends_on_its_input_is_kept(kind):
    model = nn.Sequential(kind())
    assert [one.module for one in optimize(model).kept] == [kind.__name__]


def test_weights_of_another_class_are_kept(model_of):
    """As those of quantised models and of tensors spread over devices."""

    class Wrapped(nn.Parameter):
        pass

    model = model_of("llama")
    norm = model.model.norm
    norm.weight = Wrapped(norm.weight.detach())
    assert [one.reason for one in optimize(model).kept] == ["its weights are of a subclass of Tensor"]


def test_numbers_are_drawn_anew():
    model = nn.Sequential(Draws()).requires_grad_(False)
    optimize(model)
    assert not torch.equal(model(torch.ones(3, 8)), model(torch.ones(3, 8)))


def test_modules_of_one_class_with_other_numbers():
    """The second norm's epsilon is its own."""

    class Norm(nn.Module):
        def __init__(self, eps):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.eps = eps

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    model = nn.Sequential(Norm(1e-6), Norm(10.0)).requires_grad_(False)
    x = torch.randn(3, 8)
    wanted = model(x)
    assert len(optimize(model).swapped) == 2
    torch.testing.assert_close(model(x), wanted)


def test_it_stands_in_the_package():
    assert dlinfer.transformers.optimize is optimize
