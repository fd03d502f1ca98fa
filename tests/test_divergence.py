"""KL divergence against its definition, and where tokens are ruled out."""

import torch

from ptq.statistics.divergence import divergence


def test_the_definition() -> None:
    p, q = torch.randn(2, 5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    torch.testing.assert_close(divergence(p, q), torch.nn.functional.kl_div(q, p.exp(), reduction="none").sum(-1))
    assert torch.equal(divergence(p, p), torch.zeros(5, dtype=torch.float64))


def test_tokens_that_are_ruled_out_add_nothing_and_have_no_gradient() -> None:
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(1))
    without = divergence(*logits[..., :8].log_softmax(-1))
    logits[..., 8] = -torch.inf
    p, learned = logits[0].log_softmax(-1), logits[1].requires_grad_()
    found = divergence(p, learned.log_softmax(-1))
    torch.testing.assert_close(found, without)
    found.sum().backward()
    assert learned.grad is not None and learned.grad.isfinite().all() and (learned.grad[:, 8] == 0).all()


def test_what_only_the_second_rules_out_is_infinitely_far() -> None:
    q = torch.tensor([0.0, -torch.inf])
    assert divergence(torch.zeros(2).log_softmax(-1), q.log_softmax(-1)) == torch.inf
