"""A step is made of what a command line names: its model, its loss, and what lies on the device for good."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload.cli.inputs import parse_inputs
from lightning_offload.cli.loop import Loop, is_configured, parse_loss, parse_precision
from lightning_offload.cli.steps import find_target, loss_of
from lightning_offload.cli.workload import Captured, Workload
from lightning_offload.errors import OffloadError, PolicyError, UnsupportedError
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.device_spec import DeviceSpec
from tests.capture.recording import record
from tests.cli import models

HERE = dataclasses.replace(device_spec("k40c"), kind="cpu")


def captured(
    model: str, *inputs: str, batch: int = 4, dtype: torch.dtype = torch.float32, device: DeviceSpec = HERE, **loop: Any
) -> Captured:
    """A step of a model of tests.cli.models."""
    workload = Workload(
        target=find_target(f"tests.cli.models:{model}"),
        inputs=parse_inputs(inputs),
        dtype=dtype,
        input_dtype=None,
        loop=Loop(**{"optimizer": "none", **loop}),
    )
    return workload.capture(batch, device)


@pytest.mark.usefixtures("in_python")
def test_a_factory_gives_the_step_that_training_has() -> None:
    """The digest is that of the real step with the sum of outputs for a loss; modelled times are positive."""
    graph = captured("small", "3x32x32").graph
    net, x = models.small(), torch.zeros(4, 3, 32, 32)
    assert graph.digest() == record(lambda: net(x).sum().backward(), net).digest()
    assert graph.seconds > 0
    assert {save.module for save in graph.saves} >= {"0", "3", "6"}


@pytest.mark.usefixtures("in_python")
def test_a_model_that_exists_is_planned_without_being_touched() -> None:
    """It is copied without its memory, ties included; the original keeps its values, and has no gradients."""
    before = copy.deepcopy(models.INSTANCE.state_dict())
    found = captured("INSTANCE", "int64:8")
    ids = torch.zeros(4, 8, dtype=torch.int64)
    real = models.Tied()
    assert found.graph.digest() == record(lambda: real(ids).sum().backward(), real).digest()
    assert all(torch.equal(before[name], value) for name, value in models.INSTANCE.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in models.INSTANCE.parameters())


def test_persistent_bytes_are_counted_once_and_completely() -> None:
    """Tied weights once, unused and frozen parameters, buffers, two batches on a CPU, and the optimizer's state."""
    embedding, unused, small = 50 * 16 * 4, (64 * 64 + 64) * 4, 16 * 4
    batch = 4 * 8 * 8
    for optimizer, copies in (("none", 0), ("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2)):
        found = captured("Tied", "int64:8", optimizer=optimizer)
        assert found.parameter_bytes == embedding + unused
        assert found.optimizer_bytes == copies * found.parameter_bytes
        state = embedding + unused + 2 * small + 2 * batch
        assert found.graph.persistent_bytes == state + found.optimizer_bytes


def test_a_lightning_module_is_its_training_step() -> None:
    """Its loss is taken from what it returns; logging without a trainer is no matter."""
    graph = captured("Classifier", "3x32x32", "int64:").graph
    assert any(op.name.startswith("aten._log_softmax.") for op in graph.ops)
    assert any(save.module == "net.0" for save in graph.saves)


def ops_of(found: Captured) -> list[str]:
    return [op.name.removeprefix("aten.").split(".")[0] for op in found.graph.ops]


def test_a_lightning_module_runs_as_the_trainer_runs_it() -> None:
    """Its loss is divided, not summed; old gradients lie beside forward, and in backward where they add up."""
    found = captured("Classifier", "3x32x32", "int64:")
    assert "aten.sum.default" not in {op.name for op in found.graph.ops}
    assert "div" in ops_of(found)
    assert (found.graph.old_gradient_bytes, found.graph.accumulated_bytes) == (found.parameter_bytes, 0)
    adding = captured("Classifier", "3x32x32", "int64:", accumulate=4).graph
    assert (adding.old_gradient_bytes, adding.accumulated_bytes) == (found.parameter_bytes, found.parameter_bytes)
    assert captured("small", "3x32x32").graph.old_gradient_bytes == 0


def test_autocast_leaves_the_parameters_as_they_are() -> None:
    """What convolutions save is half as large; an attention's kernels are chosen within it on a GPU too."""
    full, mixed = captured("small", "3x32x32"), captured("small", "3x32x32", autocast=torch.bfloat16)
    assert mixed.parameter_bytes == full.parameter_bytes
    assert ops_of(mixed).count("_to_copy") > ops_of(full).count("_to_copy") == 0
    on_gpu = captured("small", "3x32x32", autocast=torch.bfloat16, device=device_spec("a100"))
    assert ops_of(on_gpu).count("_to_copy") > 0


def test_a_loss_of_the_loop() -> None:
    """It gets the output and the last input, with or without names; without a last input that is an error."""
    found = captured("small", "3x32x32", "int64:", loss=nn.functional.cross_entropy)
    assert "_log_softmax" in ops_of(found)
    assert "aten.sum.default" not in {op.name for op in found.graph.ops}
    loss = lambda output, target: (output["scores"] - target).square().mean()  # noqa: E731
    named = captured("Heads", "x=16", "target=4", loss=loss)
    assert "mean" in ops_of(named)
    with pytest.raises(UnsupportedError, match="--loss needs the target as the last --input"):
        captured("small", "3x32x32", loss=nn.functional.cross_entropy)


def test_the_optimizer_of_a_lightning_module() -> None:
    """Its state is counted as it is; one that needs a Trainer is an error that says what to name."""
    found = captured("Configured", "3x32x32", "int64:", optimizer="configured", device=device_spec("t4"))
    assert found.optimizer_bytes == 2 * found.parameter_bytes
    here = captured("Configured", "3x32x32", "int64:", optimizer="configured")
    assert found.optimizer_bytes < here.optimizer_bytes < 1.01 * found.optimizer_bytes  # counts of steps lie there too
    with pytest.raises(UnsupportedError, match=r"could not be called without a Trainer: .*--optimizer momentum"):
        captured("NeedsTrainer", "3x32x32", "int64:", optimizer="configured")
    assert is_configured(models.Configured)
    assert not is_configured(models.Classifier)
    assert not is_configured(models.small)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_precision, "bf16-true", "--precision 'bf16-true' is not known: choose one of 32-true, bf16-mixed"),
        (parse_loss, "tests.cli.models:NUMBER", "--loss 'tests.cli.models:NUMBER' is an int: name a function"),
        (parse_loss, "tests.cli.models:nothing", "has no attribute 'nothing'"),
    ],
)
def test_what_a_loop_cannot_be(parse: Any, text: str, message: str) -> None:
    """One line with the value and what is allowed."""
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        parse(text)


def test_a_loss_may_be_a_class() -> None:
    """Of a module, which is made without arguments."""
    loss = parse_loss("torch.nn:CrossEntropyLoss")
    assert isinstance(loss, nn.CrossEntropyLoss)


def test_a_language_model_gets_its_ids_as_labels() -> None:
    """So its step has the cross-entropy of training; ids need no type."""
    graph = captured("gpt2", "16").graph
    assert any("log_softmax" in op.name for op in graph.ops)
    named = captured("gpt2", "input_ids=int64:16", "labels=int64:16").graph
    assert [op.name for op in named.ops] == [op.name for op in graph.ops]


def test_a_loss_in_chunks() -> None:
    """The logits are not there; where there is no layer of that name, or no such loss, that is an error."""
    whole, cut = (captured("Speaker", "int64:64", batch=16, chunked_loss=chunked).graph for chunked in (False, "head"))
    logits_bytes = 4 * 16 * 64 * 4096
    assert max(storage.num_bytes for storage in whole.storages) == logits_bytes
    assert max(storage.num_bytes for storage in cut.storages) < logits_bytes
    with pytest.raises(PolicyError, match=r"chunked_loss='lm_head': Speaker has no part of this name; .* is 'head'"):
        captured("Speaker", "int64:64", chunked_loss="lm_head")
    with pytest.raises(UnsupportedError, match="could not be computed in chunks: what `head` made was read by `sum`"):
        captured("Tied", "int64:8", chunked_loss="head")


def test_names_and_functions_give_keywords() -> None:
    """A dict of a function and named shapes are the same inputs."""
    by_name = captured("Heads", "x=16", "mask=4")
    by_function = captured("Heads", "tests.cli.models:two_inputs")
    assert by_name.graph == by_function.graph
    assert by_name.graph != captured("Heads", "16").graph


def test_a_type_casts_model_and_inputs() -> None:
    """In bfloat16 all of the step's floating-point memory is half."""
    full, half = captured("small", "3x32x32"), captured("small", "3x32x32", dtype=torch.bfloat16)
    assert half.parameter_bytes * 2 == full.parameter_bytes
    assert 2 * sum(s.num_bytes for s in half.graph.storages) == pytest.approx(
        sum(s.num_bytes for s in full.graph.storages), rel=0.01
    )


def test_losses() -> None:
    """The output's own loss if there is one, else the sum of what can be differentiated."""

    class Output:
        loss = torch.ones((), requires_grad=True)

    x = torch.ones(3, requires_grad=True)
    assert loss_of(Output()) is Output.loss
    assert loss_of({"loss": Output.loss, "logits": x}) is Output.loss
    assert loss_of({"loss": None, "logits": x}).item() == 3
    outputs: tuple[Any, ...] = ([x, 2 * x], x.argmax(), x.detach())
    assert loss_of(outputs).item() == 9
    for nothing in (None, x.detach(), {"loss": torch.ones(())}):
        with pytest.raises(UnsupportedError, match="nothing to differentiate"):
            loss_of(nothing)


def test_what_cannot_be_a_step(subtests: pytest.Subtests) -> None:
    """One error says what is wrong."""
    for model, inputs, message in [
        ("NUMBER", ["3"], "model 'tests.cli.models:NUMBER' is an int: name a torch.nn.Module, or what makes one"),
        ("with_arguments", ["3"], "needs the arguments width, depth"),
        ("broken", ["3"], "model 'tests.cli.models:broken' could not be made without memory: ValueError: no"),
        ("no_model", ["3"], "model 'tests.cli.models:no_model' makes a dict"),
        ("Detached", ["3"], "the model returned a FakeTensor with nothing to differentiate"),
        ("small", ["3x32"], "a step of 'tests.cli.models:small' on these inputs failed: RuntimeError"),
        ("small", ["3x32x31"], "check --input"),
        ("Heads", ["y=16"], "TypeError: Heads.forward() got an unexpected keyword argument 'y'"),
    ]:
        with subtests.test(model=model):
            with pytest.raises(OffloadError) as error:
                captured(model, *inputs)
            assert message in str(error.value)


def test_a_model_that_cannot_be_copied() -> None:
    """A function that makes it is asked for."""

    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot copy")

    workload = Workload(
        target=type(find_target("tests.cli.models:INSTANCE"))(text="a:b", found=Locked()),
        inputs=parse_inputs(["2"]), dtype=torch.float32, input_dtype=None,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="could not be copied: TypeError: cannot copy; name a function"):
        workload.capture(1, HERE)
