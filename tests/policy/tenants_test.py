"""Virtual token counters: what is charged, who is lifted, and the order they give."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.policy import OUTPUT_WEIGHT, PROMPT_WEIGHT, Tenants


def test_prompt_and_output_are_charged_with_their_weights():
    tenants = Tenants()
    tenants.charge("a", prompt=10)
    tenants.charge("a", output=3)
    assert tenants.served("a") == 10 * PROMPT_WEIGHT + 3 * OUTPUT_WEIGHT
    assert tenants.served("b") == 0


def test_who_was_idle_is_lifted_to_the_least_served_that_waits():
    tenants = Tenants()
    tenants.join("busy")
    tenants.join("heavy")
    tenants.charge("busy", prompt=100)
    tenants.charge("heavy", prompt=300)
    tenants.join("new")
    assert tenants.served("new") == 100
    tenants.join("heavy")  # has something waiting already
    assert tenants.served("heavy") == 300
    tenants.leave("new")
    tenants.charge("new", prompt=50)
    tenants.join("new")  # was served more than the least: what it was served stays
    assert tenants.served("new") == 150


def test_where_nobody_waits_the_last_that_did_counts():
    tenants = Tenants()
    tenants.join("")
    tenants.join("b")
    tenants.charge("", prompt=70)
    tenants.charge("b", prompt=20)
    tenants.leave("b")
    tenants.leave("")
    tenants.charge("", output=5)  # it still runs
    tenants.join("b")
    assert tenants.served("b") == 70 + 5 * OUTPUT_WEIGHT


def test_the_preempted_are_not_lifted():
    tenants = Tenants()
    tenants.join("a")
    tenants.leave("a")
    tenants.join("b")
    tenants.charge("b", prompt=9)
    tenants.join("a", is_new=False)
    assert tenants.served("a") == 0


def test_idle_tenants_are_forgotten_beyond_the_bound():
    tenants = Tenants(max_tenants=2)
    for name in "abc":
        tenants.join(name)
        tenants.charge(name, prompt=10)
        if name != "a":
            tenants.leave(name)
    assert [tenants.served(name) for name in "abc"] == [10, 0, 20]  # c was lifted to a, which waits


@settings(max_examples=200, deadline=None)
@given(
    queue=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 50)), min_size=1, max_size=30),
    served=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 100)),
)
def test_tags_take_again_and_again_the_oldest_of_the_least_served(queue, served):
    tenants = Tenants()
    for name, prompt in served.items():
        tenants.charge(name, prompt=prompt)
    names, prompts = [name for name, _ in queue], np.asarray([prompt for _, prompt in queue], np.int32)
    arrival = np.arange(len(queue), dtype=np.int32)
    by_tag = np.lexsort((arrival, tenants.tags(names, arrival, prompts)))
    left = list(range(len(queue)))
    for index in by_tag:
        least = min(tenants.served(names[i]) for i in left)
        # Among tenants that were served equally the order is free; within one it is that of arrival.
        assert tenants.served(names[index]) == least
        assert index == min(i for i in left if names[i] == names[index])
        left.remove(index)
        tenants.charge(names[index], prompt=int(prompts[index]))
