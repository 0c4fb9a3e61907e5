import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halting_reference import halting_distribution
from latentcot.core.halting import GivenPasses, Threshold, halt


def unroll(gates, rule):
    """Exit masses and last steps by calling `halt` step by step, as a model does."""
    num_tokens, num_steps = gates.shape
    exits = torch.zeros_like(gates)
    last = torch.zeros(num_tokens, dtype=torch.int64)
    active, reach = torch.arange(num_tokens), torch.ones(num_tokens, dtype=gates.dtype)
    for step in range(1, num_steps + 1):
        gate = gates[active, step - 1] if step < num_steps else torch.zeros_like(reach)
        keep = rule(reach * gate, active, step) & (step < num_steps)
        exit_prob, next_reach = halt(gate, reach, keep)
        exits[active, step - 1] = exit_prob
        last[active] = step
        active, reach = active[keep], next_reach[keep]
    return exits, last


gates = st.lists(st.lists(st.floats(0, 1), min_size=5, max_size=5), min_size=1, max_size=6).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64)
)


@settings(deadline=None)
@given(gates, st.floats(0, 1))
def test_steps_equal_the_closed_form(gates, tau):
    exits, last = unroll(gates, Threshold(tau))
    want_exits, want_last = halting_distribution(gates, tau)
    assert torch.equal(last, want_last)
    torch.testing.assert_close(exits, want_exits, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(exits.sum(-1), torch.ones(len(gates)).double(), rtol=0, atol=1e-12)


def test_a_hand_made_case():
    exits, last = halting_distribution(torch.tensor([[0.5, 0.4, 0.9, 0.7]]), tau=0.25)
    # reach: 1, 0.5, 0.2 < tau: stops at step 2 with all of its 0.5.
    assert last.tolist() == [2]
    torch.testing.assert_close(exits, torch.tensor([[0.5, 0.5, 0.0, 0.0]]))


def test_gates_learn_through_the_mixture():
    gates = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(4, 3, dtype=torch.float64)

    def expectation(g):
        return (unroll(g, Threshold(0.3))[0] * values).sum()

    def reference(g):
        return (halting_distribution(g, 0.3)[0] * values).sum()

    ours = torch.autograd.grad(expectation(gates), gates)[0]
    theirs = torch.autograd.grad(reference(gates), gates)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_given_passes_are_executed_whatever_the_gates_say():
    gates = torch.rand(6, 4)
    passes = torch.tensor([[1, 2, 3], [4, 1, 4]])
    exits, last = unroll(gates, GivenPasses(passes))
    assert last.tolist() == passes.flatten().tolist()
    torch.testing.assert_close(exits.sum(-1), torch.ones(6))
