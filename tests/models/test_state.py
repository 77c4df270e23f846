"""Layers by what they keep."""

import torch

from strata.models.state import FixedState, PagedRows, WindowRows, group_numbers, state_groups

ROWS, OTHER_ROWS = PagedRows((2, 16)), PagedRows((24,), tensors=1)
WINDOW = WindowRows(ROWS, 8)
STATE, OTHER_STATE = FixedState(((4, 16),), (torch.float32,)), FixedState(((3,), (5, 7)), (torch.float32, None))


def test_fixed_states_come_last_and_their_layers_are_given_the_batch_itself() -> None:
    states = (STATE, WINDOW, OTHER_STATE, ROWS, STATE, WINDOW)
    groups = [(group.state, group.layers) for group in state_groups(states)]
    assert groups == [(ROWS, (3,)), (WINDOW, (1, 5)), (STATE, (0, 4)), (OTHER_STATE, (2,))]
    assert group_numbers(states) == (0, 1, 0, 0, 0, 1)
    assert group_numbers((OTHER_ROWS, ROWS)) == (0, 1)
    assert group_numbers((STATE, WINDOW)) == (0, 0)
