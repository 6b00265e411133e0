"""``loss="chunked"``: the losses of ordinary logits, the same bits wherever weights are."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import overspill
from overspill.logits import rows
from overspill.logits.deferred import DeferredLogits
from tests.devices import CPU, DEVICE, SIM, about_cpu, normal, plainly

transformers = pytest.importorskip("transformers")

V, B, S, STEPS = 2000, 2, 40, 4
SHAPE: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TIGHT = {"device": SIM, "device_memory": "2500KiB", "host_memory": "64MiB"}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": CPU, "host_memory": "64MiB"},
    "tight": TIGHT,
    "roomy": {"device": SIM, "device_memory": "64MiB", "host_memory": "64MiB"},
    "step": {**TIGHT, "update": "step"},
    "backward": {**TIGHT, "update": "backward"},
    "recompute": {**TIGHT, "activations": "recompute"},
    "clipped": {**TIGHT, "max_grad_norm": 1e9},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 8 * 4 * V)
    monkeypatch.setattr(rows, "LEAST_TOKENS", 8)


def llama(tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).to(DEVICE, dtype)


def batch(step: int) -> torch.Tensor:
    draw = torch.Generator("cpu").manual_seed(step)
    return torch.randint(3, V, (B, S), generator=draw, device="cpu").to(DEVICE)


def loss_of(model: Any, step: int) -> torch.Tensor:
    """The model's own loss; in the last step, log-probabilities of each token too."""
    ids = batch(step)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    if step == STEPS - 1:
        logits = model(input_ids=ids).logits[:, :-1].float()
        loss = loss - 0.1 * logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
    return loss


def train(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def offloaded(tied: bool, place: str, **more: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = llama(tied)
    options = {**PLACES[place], "loss": "chunked", "rates": overspill.Rates(), **more}
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        losses = train(model, optimizer)
        overspill.unwrap(model)
    return losses, {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("tied", [False, True])
def test_losses_are_the_same_bits_wherever_weights_are(tied: bool) -> None:
    plain = llama(tied)
    master = plainly(overspill.optim.AdamW, plain.parameters(), lr=1e-3, master="split")
    expected = train(plain, master)
    found = {place: offloaded(tied, place) for place in PLACES}
    losses, state = found["host"]
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses != expected  # or the chunks were not used
    for place, (others, their_state) in found.items():
        assert others == losses, place
        assert all(torch.equal(state[name], t) for name, t in their_state.items()), place


class Largest(TorchDispatchMode):
    """The largest tensor that an operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(made)
                 if isinstance(t, torch.Tensor) and type(t) is not DeferredLogits]  # fmt: skip
        self.numel = max(self.numel, *sizes, 0)
        return made


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", [None, "chunked"])
def test_no_tensor_has_the_size_of_the_logits(loss: str | None, tied: bool) -> None:
    model = llama(tied)
    options = {**TIGHT, "rates": overspill.Rates(), "loss": loss}
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        for _ in range(2):
            ids = batch(0).repeat(2, 1)  # more logits than weights
            with Largest() as largest:
                model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (largest.numel >= ids.numel() * V) == (loss is None)


FAMILIES: dict[str, Any] = {
    "gpt2": ("GPT2LMHead", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": V}),
    "opt": ("OPT", {"word_embed_proj_dim": 64, "ffn_dim": 128}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"head_dim": 16}),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPTNeoX", {}),
    "mamba": ("Mamba", {"state_size": 4}),
}


def family(name: str) -> Any:
    prefix, more = FAMILIES[name]
    torch.manual_seed(0)
    of_config = {"gemma3": "Gemma3TextConfig", "gpt2": "GPT2Config"}
    kind = of_config.get(name, f"{prefix}Config")
    given = more if "n_embd" in more else {**SHAPE, **more}
    config = getattr(transformers, kind)(**{**given, "use_cache": False})
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "hidden_dropout",
                    "attention_dropout"):  # fmt: skip
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    kind = f"{prefix}Model" if name == "gpt2" else f"{prefix}ForCausalLM"
    return getattr(transformers, kind)(config).to(DEVICE)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    """Scaled, capped and tied heads: the loss, the gradients, and no ordinary logits."""
    plain, chunked = family(name), family(name)
    ids = batch(0)
    expected = plain(input_ids=ids, labels=ids).loss
    expected.backward()
    options = {"device": SIM, "device_memory": "16MiB", "rates": overspill.Rates()}
    sgd = torch.optim.SGD(chunked.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in chunked.named_parameters()}
    with overspill.wrap(chunked, sgd, **options, loss="chunked") as optimizer:
        made = chunked(input_ids=ids, labels=ids)
        assert isinstance(made.logits, DeferredLogits)
        made.loss.backward()
        assert not made.logits.family.ordinary
        assert made.loss.item() == pytest.approx(expected.item(), rel=1e-5)
        optimizer.step()
        overspill.unwrap(chunked)
    after = dict(chunked.named_parameters())
    for key, p in plain.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(before[key] - after[key], grad, rtol=1e-3, atol=2e-6)


def test_an_own_model_and_an_own_loss() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(V, 32)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
            self.out = torch.nn.Linear(32, V)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids)
            for block in self.blocks:
                x = x + block(x).tanh()
            logits: torch.Tensor = self.out(x)
            return logits

    def run(wrapped: bool) -> list[float]:
        torch.manual_seed(0)
        model = Own().to(DEVICE)
        made: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if wrapped:
            made = overspill.wrap(model, made, **TIGHT, loss="chunked", rates=overspill.Rates())
        losses = []
        for step in range(STEPS):
            ids = batch(step)
            loss = functional.cross_entropy(model(ids)[:, :-1].reshape(-1, V), ids[:, 1:].flatten())
            loss.backward()
            made.step()
            made.zero_grad()
            losses.append(loss.item())
        if wrapped:
            made.close()
        return losses

    assert run(True) == pytest.approx(run(False), rel=1e-5)


def test_adapters_over_a_frozen_head() -> None:
    peft = pytest.importorskip("peft")

    def run(wrapped: bool, saved: bool) -> list[float]:
        model = llama(dtype=torch.float32)
        more = {"modules_to_save": ["lm_head"]} if saved else {}
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], **more))
        made: Any = adamw(model)
        if wrapped:
            made = overspill.wrap(model, made, **TIGHT, loss="chunked", rates=overspill.Rates())
        losses = train(model, made)
        if wrapped:
            made.close()
        return losses

    for saved in (False, True):
        assert run(True, saved) == pytest.approx(run(False, saved), rel=1e-5)


def test_logits_of_an_earlier_step_are_refused() -> None:
    model, ids = llama(), batch(0)
    with overspill.wrap(model, adamw(model), **TIGHT, loss="chunked") as optimizer:
        made = model(input_ids=ids, labels=ids)
        made.loss.backward()
        optimizer.step()
        with pytest.raises(overspill.OffloadError, match="use logits before step"):
            made.logits.argmax(-1)
        with pytest.raises(overspill.OffloadError, match="use logits before step"):
            made.logits.mean()
        optimizer.zero_grad()
        with torch.no_grad():  # evaluation
            made = model(input_ids=ids, labels=ids)
            assert math.isfinite(made.loss.item())
            plain = model.lm_head(model.model(input_ids=ids).last_hidden_state)
            assert torch.equal(made.logits.argmax(-1), plain.argmax(-1))
            assert torch.equal(made.logits.cpu(), plain.cpu())


def test_generation_has_the_tokens_of_ordinary_logits() -> None:
    model = llama()
    given: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    expected = model.generate(batch(0), **given)
    with overspill.wrap(model, device=SIM, loss="chunked"):
        assert torch.equal(model.generate(batch(0), **given), expected)


def test_a_copy_of_a_wrapped_model_can_be_wrapped() -> None:
    model = llama()
    with overspill.wrap(model, adamw(model), device=SIM, loss="chunked"):
        with overspill.materialized(model):
            other = copy.deepcopy(model)
        assert type(other(input_ids=batch(0)).logits) is torch.Tensor
        with overspill.wrap(other, adamw(other), device=SIM, loss="chunked"):
            assert isinstance(other(input_ids=batch(0)).logits, DeferredLogits)
        assert isinstance(model(input_ids=batch(0)).logits, DeferredLogits)


@about_cpu
def test_a_plan_that_fits_runs() -> None:
    """The gradient of the head, which waits for backward, takes no room of activations."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SHAPE, "vocab_size": 20_000})
    )
    options: dict[str, Any] = {
        "device": "cpu", "tokens": 512, "activations": "host", "update": "step",
        "rates": overspill.Rates(), "loss": "chunked",
    }  # fmt: skip
    sizes = range(30, 80)  # MiB
    least = next(
        n for n in sizes
        if overspill.plan(model, adamw(model), **options, host_memory=n << 20).fits
    )  # fmt: skip
    assert least > sizes[0]
    ids = torch.arange(3, 515)[None]
    with overspill.wrap(model, adamw(model), **options, host_memory=least << 20) as optimizer:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_several_models_share_the_option() -> None:
    policy, value = llama(), torch.nn.Linear(64, 1).to(DEVICE)
    models = {"policy": policy, "value": value}
    params = [*policy.parameters(), *value.parameters()]
    with overspill.wrap(models, torch.optim.SGD(params, lr=0.1), device=SIM, loss="chunked"):
        made = policy(input_ids=batch(0), labels=batch(0))
        assert isinstance(made.logits, DeferredLogits)
        assert type(value(normal(0, 50, 64))) is torch.Tensor


def test_what_has_no_head_is_refused_before_anything_changes() -> None:
    model = torch.nn.Linear(8, 8).to(DEVICE)
    before = dict(vars(model))
    with pytest.raises(overspill.OffloadError, match="leave loss out"):
        overspill.wrap(model, torch.optim.SGD(model.parameters()), device=SIM, loss="chunked")
    assert vars(model).keys() == before.keys() and type(model.weight) is torch.nn.Parameter
    overspill.wrap(model, torch.optim.SGD(model.parameters()), device=SIM).close()
    with pytest.raises(ValueError, match="loss must be one of"):
        overspill.wrap(model, torch.optim.SGD(model.parameters()), loss="chunk")


def test_plans_name_the_logits() -> None:
    """They are needed, but do not fit beside the other activations, which may move nowhere."""
    model = llama()
    options: dict[str, Any] = {
        "device": SIM, "device_memory": "64MiB", "host_memory": "6MiB", "activations": "recompute",
        "tokens": 5000, "rates": overspill.Rates(),
    }  # fmt: skip
    whole = overspill.plan(model, adamw(model), **options)
    assert "MiB are logits" in str(whole.shortfalls[0])
    assert overspill.plan(model, adamw(model), **options, loss="chunked").fits


def test_auto_follows_the_plan() -> None:
    model = llama()
    budgets = {"device": SIM, "host_memory": "64MiB", "tokens": 2048, "rates": overspill.Rates()}

    def planned(device_memory: str, loss: str | None) -> overspill.Plan:
        return overspill.plan(
            model, adamw(model), **budgets, device_memory=device_memory, loss=loss,
        )  # fmt: skip

    assert not planned("512MiB", "auto").detail.loss_in_chunks
    whole, chunked, auto = (planned("8MiB", each) for each in (None, "chunked", "auto"))
    assert not whole.fits and chunked.fits and auto.fits
    assert auto.detail.loss_in_chunks and chunked.detail.loss_in_chunks
    assert "loss='chunked'" in str(whole.shortfalls[0])
    other = torch.nn.Linear(8, 8).to(DEVICE)  # no language model
    assert overspill.plan(other, torch.optim.SGD(other.parameters()), device=SIM, loss="auto").fits
    with overspill.wrap(model, adamw(model), **budgets, device_memory="8MiB", loss="auto"):
        assert isinstance(model(input_ids=batch(0), labels=batch(0)).logits, DeferredLogits)
