"""Kinds of layers are told by the names of aten ops."""

from __future__ import annotations

import pytest

from lightning_offload.planning.policies.kinds import Kind, kind_of


def test_kinds_of_aten_ops(subtests: pytest.Subtests) -> None:
    """Forward, backward, in-place and vendors' kernels of a layer are of its kind; others are of none."""
    for kind, names in [
        (Kind.CONV, "convolution cudnn_convolution convolution_backward conv_depthwise3d _conv_depthwise2d"),
        (Kind.LINEAR, "mm addmm _scaled_mm mkldnn_linear mv addmv"),
        (Kind.MATMUL, "bmm baddbmm dot"),
        (Kind.ATTENTION, "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu_backward"),
        (Kind.RECURRENT, "mkldnn_rnn_layer _cudnn_rnn_backward _thnn_fused_lstm_cell _thnn_fused_gru_cell"),
        (Kind.SOFTMAX, "_softmax _log_softmax _log_softmax_backward_data"),
        (Kind.ACTIVATION, "relu relu_ gelu silu sigmoid_ tanh threshold_backward leaky_relu hardtanh elu"),
        (Kind.JOIN, "add add_"),
        (Kind.CONCAT, "cat stack"),
        (Kind.OTHER, "mul clone embedding _to_copy scatter nll_loss_forward linalg_vector_norm convert where"),
        (Kind.OTHER, "max_pool2d_with_indices native_batch_norm native_layer_norm _fused_rms_norm native_dropout"),
    ]:
        with subtests.test(kind=kind):
            for name in names.split():
                assert kind_of(f"aten.{name}.default") is kind, name


def test_names_without_a_namespace() -> None:
    """An op of hand-made graphs may have a bare name."""
    assert kind_of("relu_") is Kind.ACTIVATION
