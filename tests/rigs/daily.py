"""Choose what the default run has of the rigs' own tests, by name, and of a product of settings: the rest is slow."""

DAILY = {
    # simgpu: a race is seen and fails its test, memory is counted and ends, streams run beside each other
    "test_use_before_copy_is_done",
    "test_copy_into_a_buffer_still_read",
    "test_host_overwrites_source_early",
    "test_host_reads_result_early",
    "test_record_stream",
    "test_layers_streamed_through_two_slots",
    "test_out_of_memory_and_counters",
    "test_backward_runs_on_the_forwards_stream",
    "test_a_race_fails_the_test_that_has_it_and_no_other",
    # the host's accesses of pinned memory are seen, and CUDA's arithmetic is the reference's
    "test_a_slab_written_while_its_copy_is_in_flight_is_reported",
    "test_each_deleted_wait_of_a_step_is_reported",
    "test_bytes_beside_a_copy_in_its_pages_are_free",
    "test_an_access_before_the_wait_for_a_copy_down_is_reported",
    "test_a_norm_has_the_references_bits",
    "test_an_adamw_run_has_the_references_bits",
    # parity: right runs are equal, a wrong one is named, and observing a run does not change it
    "test_two_plain_runs_are_equal",
    "test_observing_adds_no_callback",
    "test_observing_leaves_the_order_in_which_units_are_stepped",
    "test_what_is_on_the_device_is_kept_without_waiting_for_it",
    "test_a_dropped_gradient_is_named",
    "test_a_gradient_dropped_in_the_last_batch_is_named",
    "test_a_stale_weight_is_named",
    "test_an_overwritten_accumulation_is_named",
    "test_one_random_number_too_many_is_named",
    "test_a_buffer_updated_twice_is_named",
    "test_zeroed_optimizer_state_is_named",
    "test_a_prediction_off_by_one_representable_number_is_named",
    "test_a_wrong_validation_loss_is_named",
    "test_a_negative_zero_is_named",
    "test_a_wrong_run_on_the_simulated_accelerator_is_named",
    "test_check_compares_plain_with_streaming_and_returns_its_telemetry",
    "test_check_raises_where_the_streaming_run_differs",
    "test_pairwise_covers_every_pair",
    "test_a_product_keeps_each_value_in_the_default_run",
    "test_the_default_run_has_each_value_of_a_test_that_is_parametrized_several_times",
    "test_few_of_a_tests_items_are_of_both_devices_and_apart",
}


def axes(item):
    """The ids of its values: one for each time that the test is parametrized."""
    return list(enumerate(item.callspec._idlist)) if hasattr(item, "callspec") else []


def not_needed(alike):
    """Of a test that is parametrized several times: all but few of its items, which have every value of each time.

    The product is slow, as that of a `parity.product` is. Where there is a choice, what has a race checker stays.
    """
    left = sorted(alike, key=lambda item: "simgpu" not in item.callspec._idlist)
    missing = {value for item in alike for value in axes(item)}
    while missing:
        best = max(left, key=lambda item: len(missing.intersection(axes(item))))
        missing.difference_update(axes(best))
        left.remove(best)
    return left


def more_than_few(alike, count):
    """Of a test with the mark ``few(count)``: all items but ``count`` that lie apart, half of them on each device.

    What is the same for all cases is seen in few; each case by itself is seen in the slow run.
    """
    simulated = [item for item in alike if "simgpu" in item.callspec._idlist]
    others = [item for item in alike if item not in simulated]
    half = min(len(simulated), max(count - count // 2, count - len(others)))
    kept = [*_apart(simulated, half), *_apart(others, count - half)]
    return [item for item in alike if item not in kept]


def _apart(items, count):
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]
