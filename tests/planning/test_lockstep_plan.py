"""Plans of calls in lockstep: bytes as a device counts them, and what they depend on (planned_calls.py)."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch

import sp_lightning
from sp_lightning.cli import main
from sp_lightning.core.machine import MACHINES
from sp_lightning.errors import OptionError

transformers = pytest.importorskip("transformers")

ROWS, PROMPT, ANSWER = 2, 64, 48
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "vocab_size": 128, "pad_token_id": 0}


def config(layers=8):
    return transformers.LlamaConfig(**SIZES, num_hidden_layers=layers)


@functools.cache
def planned(**given):
    given = {"machine": MACHINES["rtx3060"], "device": "simgpu", "answer": ANSWER, "at_once": 4, "window": 2} | given
    batch = {"input_ids": torch.ones(ROWS, PROMPT, dtype=torch.long)}
    return sp_lightning.plan(lambda: transformers.LlamaForCausalLM(config()), batch, **given)


@pytest.mark.seldom
def test_the_largest_batches_at_once_fit_and_larger_ones_do_not():
    def of(rows, device_memory="40MiB"):
        batch = {"input_ids": torch.ones(rows, PROMPT, dtype=torch.long)}
        given = {
            "machine": MACHINES["rtx3060"],
            "device": "simgpu",
            "answer": ANSWER,
            "predict_at_once": 4,
            "window": 2,
        }
        make = functools.partial(transformers.LlamaForCausalLM, config())
        return sp_lightning.plan(make, batch, device_memory=device_memory, **given)

    most = of(ROWS).largest_batch // 4  # of one of them
    assert most > ROWS and of(most).fits and not of(most + 1).fits


@pytest.mark.seldom
def test_as_many_calls_are_planned_as_fit():
    one = planned(at_once=1).lockstep[0]
    more = planned(at_once=2).lockstep[0].device_nbytes - one.device_nbytes
    cache = 2 * 8 * ROWS * (PROMPT + ANSWER) * 128 * 4  # keys and values of layers, for tokens, in FP32
    assert cache <= more <= cache * 9 / 8  # and the copy of one layer that the running call has
    found = planned(at_once="auto", device_memory=one.device_nbytes + 9 * more + more // 2).lockstep[0]
    assert found.at_once == 10 and found.fits and not planned(device_memory=one.device_nbytes).lockstep[0].fits


@pytest.mark.slow
def test_an_auto_window_takes_what_calls_leave():
    one = planned(at_once=1, window="auto").lockstep[0]
    assert one.window == len(planned().units)
    tight = planned(at_once="auto", window="auto", device_memory=planned(at_once=3).lockstep[0].device_nbytes)
    assert (tight.lockstep[0].at_once, tight.lockstep[0].window) == (3, 2)
    roomy = planned(at_once="auto", window="auto", device_memory=planned(at_once=5).lockstep[0].device_nbytes)
    assert (roomy.lockstep[0].at_once, roomy.lockstep[0].window) == (2, one.window)  # all units beside two


@pytest.mark.seldom
def test_a_pass_of_few_rows_takes_the_time_in_which_the_devices_memory_is_read():
    machine = dataclasses.replace(MACHINES["rtx3060"], up_bytes_per_s=1e15, device_bytes_per_s=1e9)
    slow, fast = (planned(machine=one, at_once=None) for one in (machine, MACHINES["rtx3060"]))
    weights = sum(
        p.nbytes for name, p in transformers.LlamaForCausalLM(config()).named_parameters() if "embed" not in name
    )
    cache = 2 * 8 * ROWS * (PROMPT + ANSWER) * 128 * 4  # keys and values of layers, for tokens, in FP32
    # For each token torch.cat reads the cache and writes it anew, and attention reads it; the rest are activations.
    assert weights + 3 * cache * PROMPT / (PROMPT + ANSWER) < slow.step_s * 1e9 < weights + 3 * cache
    assert slow.binds == "compute" and slow.floor_s > 0.99 * slow.step_s > 20 * fast.step_s


@pytest.mark.slow
def test_calls_share_the_time_of_a_trip_and_speculation_has_fewer():
    one, four = (planned(at_once=count).lockstep[0] for count in (1, 4))
    assert four.weights_per_token == pytest.approx(one.weights_per_token / 4)
    assert 3 < four.tokens_per_s / one.tokens_per_s <= 4.001
    guessing = planned(at_once=1, guessed=4, accepted=2.5).lockstep[0]
    assert guessing.weights_per_token == pytest.approx(one.weights_per_token / 2.5)
    assert guessing.token_s == pytest.approx(one.token_s / 2.5, rel=0.1)
    slow = planned(at_once=1, guessed=400, accepted=2.5, link="1000GB").lockstep[0]
    fast = planned(at_once=1, link="1000GB").lockstep[0]
    assert slow.token_s > 5 * fast.token_s  # where compute takes the time, guesses cost more than they bring


@pytest.mark.slow
def test_a_cache_on_the_host_has_room_for_more_calls():
    there, away = planned(at_once="auto", device_memory="12MiB").lockstep
    assert (there.cache, away.cache) == ("device", "host")
    assert away.at_once > there.at_once
    assert away.first_s > 0 and away.token_s > there.token_s


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"at_once": 0}, "at_once must be 'auto' or an int >= 1"),
        ({"answer": None}, "at_once must be given together with answer"),
        ({"at_once": None, "predict_at_once": 0}, "predict_at_once must be an int >= 1"),
        ({"at_once": None, "predict_at_once": 2, "answer": None}, "predict_at_once must be given together with answer"),
        ({"at_once": None, "guessed": 3}, "guessed must be given together with at_once"),
        ({"at_once": None, "accepted": 2.0}, "accepted must be given together with at_once"),
        ({"guessed": -1}, "guessed must be an int >= 0"),
        ({"guessed": 2, "accepted": 3.5}, "accepted must be from 1 to 3, one more than guessed"),
    ],
)
def test_calls_that_cannot_be_are_refused(given, message):
    with pytest.raises(OptionError, match=message):
        planned(**given)


@pytest.mark.seldom
def test_the_command_prints_what_calls_in_lockstep_take(tmp_path, capsys):
    path = tmp_path / "config.json"
    config().save_pretrained(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        return ended.value.code

    given = ["plan", "--model", str(path), "--seq", "64", "--machine", "rtx4060", "--inference"]
    assert run(*given, "--guessed", "3", "--accepted", "2", "--json", str(tmp_path / "plan.json")) == 0
    printed = capsys.readouterr().out
    assert "Calls in lockstep, of 1 rows each" in printed and "answers of 256 tokens" in printed
    assert "\nOne call alone, as in the first lines:\n" in printed and "\nSpeed of one call alone: " in printed
    there, away = json.loads((tmp_path / "plan.json").read_text())["lockstep"]
    assert (there["cache"], away["cache"], there["at_once"]) == ("device", "host", 64)
    assert run(*given[:-1], "--at-once", "3") == 2
    assert "at_once must be given together with --inference" in capsys.readouterr().err
    assert run("plan", "--config", "examples/predict/config.yaml", "--inference") == 2
    assert "inference must be left out beside a script or arguments of fit" in capsys.readouterr().err
