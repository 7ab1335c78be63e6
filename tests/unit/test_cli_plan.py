"""`kvfold plan`: figures, text and JSON, comparisons, explanations, and every way to fail."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvfold.cli import EXIT_USAGE, main
from kvfold.models import load, shipped

WIDTH = 100


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["plan", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out)


GLM = ("glm-5.3", "--tp", "8", "--kv-cache-dtype", "fp8_ds_mla")


def test_the_figures_of_a_folded_model(capsys: pytest.CaptureFixture[str]) -> None:
    report = told(capsys, *GLM, "--host", "500GB", "--sequence-tokens", "1000")
    assert report["per_token"]["unique_bytes"] == 53_940
    assert report["per_token"]["copies_bytes"] == 8 * 53_940
    assert report["kv_tp_replicas"] == report["engine_kv_tp_replicas"] == 8
    assert report["replicated_layout"] is True
    assert report["engine_slot_bytes"] == {"single": 3_452_928, "copies": 27_619_328}
    [group] = report["groups"]
    assert [(k["kind"], k["layers"], k["replicas"], k["folded"]) for k in group["kinds"]] == [
        ("mla", 78, 8, True),
        ("indexer", 21, 8, True),
    ]
    # In whole slots of 3,452,928 B for 64 tokens.
    [tier] = report["tiers"]
    assert tier["tokens"] == 500 * 10**9 * 64 // 3_452_928
    assert tier["sequences"] == 500 * 10**9 * 64 // (3_452_928 * 1000)
    assert tier["tokens_of_copies"] == 500 * 10**9 // (8 * 53_940)


def test_layers_that_do_not_fold_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    report = told(capsys, "kimi-k3", "--tp", "8", "--disk", "1TB")
    states, attention = report["groups"]
    assert states["kinds"][0]["folded"] is False
    assert "states split over tp=8" in states["kinds"][0]["reason"]
    assert attention["kinds"][0]["replicas"] == 8
    # Three groups of 23 states and one of 24 latents, all in pages of 768 latents.
    page_bytes = 768 * 1152
    assert report["engine_groups"] == 4
    assert report["engine_slot_bytes"] == {
        "single": 24 * page_bytes,
        "copies": 8 * 24 * page_bytes,
    }
    assert report["per_sequence"]["state_bytes"] == 69 * 6_512_640
    [disk] = report["tiers"]
    sequence = 32_768 * attention["slot_bytes"] // attention["tokens_per_chunk"]
    assert disk["sequences"] == 10**12 // (sequence + states["slot_bytes"])


def test_the_text_tells_what_the_json_tells(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *GLM, "--host", "500GiB", "--disk", "4TiB")
    assert (status, err) == (0, "")
    for part in (
        "glm-5.3 (GlmMoeDsaForCausalLM): 78 layers, KV cache fp8_ds_mla, block size 64",
        "slot 3,452,928 B (3.29 MiB)",
        "folded 8:1 (same bytes on every rank of the stage); first fragment on 0-7",
        "unique 53,940 B; every rank's copy 431,520 B (8.00 times)",
        "one copy 3,452,928 B; 8 copies 27,619,328 B",
        "host 500 GiB  9,950,899 tokens",
        "disk 4 TiB    81,517,765 tokens",
    ):
        assert part in out
    _, out, _ = run(capsys, "glm-5.3-flash", "--tp", "8")
    assert "11 layers of circular_buffer, outside prefix caching: kept in position" in out
    assert "what group 0 stores can only be read at the same tp" in " ".join(out.split())


@pytest.mark.parametrize("name", shipped())
@pytest.mark.parametrize("tp", ["1", "2"])
def test_every_model_fits_100_columns(
    capsys: pytest.CaptureFixture[str], name: str, tp: str
) -> None:
    extra = ("--host", "1TB", "--compare", "tp=1", "--compare", "tp=4,dcp=2", "--compare", "tp=7")
    for arguments in ((name, "--tp", tp, *extra), (name, "--tp", tp, "--explain", "0")):
        status, out, _ = run(capsys, *arguments)
        if "--explain" not in arguments:
            assert status == 0
        assert "\x1b" not in out
        assert [line for line in out.splitlines() if len(line) > WIDTH] == []


def test_the_command_is_ready_to_paste(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from kvfold.vllm.settings import ConnectorSettings

    folder = tmp_path / "my model's"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load("glm-5.3").values))
    sizes = ("--host", "2GiB", "--disk", "3GiB", "--blocks-per-chunk", "4")
    layout = ("--tp", "4", "--pp", "2", "--dcp", "2", "--block-size", "64", "--dp", "2")
    report = told(capsys, str(folder), *layout, *sizes)
    words = shlex.split(report["command"].replace("\\\n", " "))
    assert any("2 data-parallel replicas" in note for note in report["notes"])
    assert words[:3] == ["vllm", "serve", str(folder)]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    transfer = json.loads(options.pop("--kv-transfer-config"))
    assert options == {
        "--tensor-parallel-size": "4",
        "--decode-context-parallel-size": "2",
        "--pipeline-parallel-size": "2",
        "--data-parallel-size": "2",
        "--block-size": "64",
    }
    assert transfer["kv_connector"] == "KvfoldConnector"
    settings = ConnectorSettings.parse(transfer["kv_connector_extra_config"])
    assert settings.store().host_bytes == 2 << 30
    assert settings.store().disk_bytes == 3 << 30
    assert settings.blocks_per_chunk == 4


def test_a_shipped_config_is_said_to_need_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    notes = told(capsys, "gemma-3-27b", "--pp", "2")["notes"]
    assert any("ships with kvfold" in note for note in notes)


def test_small_blocks_of_windows_do_not_cost_a_slot_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    groups = told(capsys, "deepseek-v4-flash", "--tp", "8")["groups"]
    spans = [(group["tokens_per_block"], group["tokens_per_chunk"]) for group in groups]
    # Hits end every 256 tokens; a window stores what it looks back on there: 127 tokens, or 7.
    assert spans == [(256, 256), (64, 128), (64, 128), (4, 8), (8, 128)]


def test_layouts_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    others = ["dcp=2", "tp=16", "tp=3", "tp=4,pp=2", "dcp=2,block-size=64", "kv-cache-dtype=fp8"]
    arguments = [a for text in others for a in ("--compare", text)]
    rows = told(capsys, "deepseek-v3", "--tp", "8", "--block-size", "32", *arguments)["comparison"]
    base, halved, wider, refused, stages, twice, fp8 = rows
    assert base["reads_base"] is True
    # Block hashes are equal where block_size x dcp is; a slot is laid out by token.
    assert (halved["block_size"], halved["reads_base"]) == (16, True)
    assert halved["copies_bytes"] == 4 * 70_272
    assert (wider["block_size"], wider["kv_tp_replicas"], wider["reads_base"]) == (32, 16, True)
    assert "tp=3" in refused["refused"]
    assert stages["reads_base"] is True
    assert (twice["block_size"], twice["reads_base"]) == (64, False)
    assert (fp8["unique_bytes"], fp8["reads_base"]) == (35_136, False)


def test_a_layout_with_less_dcp_takes_larger_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("deepseek-v3", "--tp", "8", "--dcp", "4", "--block-size", "32")
    rows = told(capsys, *base, "--compare", "dcp=1", "--compare", "dcp=8")["comparison"]
    assert [(r["block_size"], r["reads_base"]) for r in rows] == [
        (32, True),
        (128, True),
        (16, True),
    ]


def test_no_block_is_smaller_than_the_kernels_take(capsys: pytest.CaptureFixture[str]) -> None:
    others = ("--compare", "dcp=8", "--compare", "dcp=8,block-size=8")
    rows = told(capsys, *GLM, *others)["comparison"]
    found = [(r["block_size"], r["base_block_size"], r["reads_base"]) for r in rows]
    # Pages of an indexer are not divisible by token: what DCP stores, no other layout reads.
    assert found == [(64, None, True), (64, 512, False), (8, None, False)]
    _, out, _ = run(capsys, *GLM, *others)
    out = " ".join(out.split())
    assert out.count("with --block-size 512 for the first they can") == 1
    assert "tp=8 dcp=8 fp8_ds_mla: the kernels cannot take" in out
    notes = told(capsys, *GLM, "--block-size", "32")["notes"]
    assert any("kernels take blocks of 64 tokens" in note for note in notes)
    assert not any("kernels" in note for note in told(capsys, *GLM, "--block-size", "128")["notes"])
    rows = told(capsys, "deepseek-v3", "--tp", "8", "--compare", "dcp=2")["comparison"]
    assert [(r["block_size"], r["base_block_size"]) for r in rows] == [(16, None), (16, 32)]
    rows = told(capsys, "deepseek-v3", "--tp", "8", "--block-size", "32", "--compare", "dcp=2")[
        "comparison"
    ]
    assert [(r["block_size"], r["base_block_size"], r["reads_base"]) for r in rows] == [
        (32, None, True),
        (16, None, True),
    ]


def test_pages_kept_whole_are_read_by_their_own_topology_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("kimi-k3", "--tp", "2", "--compare", "tp=2", "--compare", "tp=2,pcp=2")
    rows = told(capsys, *arguments, "--block-size", "3072")["comparison"]
    assert [row["reads_base"] for row in rows] == [True, True, False]


def test_all_about_one_layer(capsys: pytest.CaptureFixture[str]) -> None:
    layers = told(capsys, "glm-5.3", "--tp", "8", "--dcp", "2", "--explain", "6")
    assert [x["name"] for x in layers] == [
        "model.layers.6.self_attn.attn",
        "model.layers.6.self_attn.indexer.k_cache",
    ]
    assert [f["owners"] for f in layers[0]["fragments"]] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layers[0]["fragments"][1]["first_writer"] in (1, 3, 5, 7)
    _, out, _ = run(
        capsys, "llama-3.1-8b", "--tp", "16", "--explain", "model.layers.3.self_attn.attn"
    )
    assert out.count("model.layers.") == 1
    assert "fragment  head shard 7, token shard 0: ranks 14-15; first writer" in out
    _, out, _ = run(capsys, "kimi-k3", "--tp", "32", "--explain", "0")
    assert "... and 24 more fragments (all with --json)" in out


def test_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    arguments = ("glm-5.3", "--tp", "8", "--compare", "tp=4", "--plot", str(file))
    assert run(capsys, *arguments)[0] == 0
    assert file.read_text().startswith("<?xml")
    for wrong in (tmp_path / "plan.nothing", tmp_path / "none" / "plan.png"):
        status, _, err = run(capsys, "glm-5.3", "--plot", str(wrong))
        assert status == EXIT_USAGE
        assert "--plot=" in err
        assert "a picture file such as plan.png" in err


def test_a_picture_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = run(capsys, "glm-5.3", "--plot", "plan.png")
    assert (status, out) == (EXIT_USAGE, "")
    assert "pip install 'kvfold[plot]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "model='nothing': expected a config.json, a folder with one, or a name"),
        (("lama-3.1-8b",), "did you mean llama-3.1-8b"),
        (("llama-3.1-8b", "--tp", "0"), "tp=0: expected a whole number of at least 1"),
        (("llama-3.1-8b", "--tp", "3"), "tp=3: expected a divisor of num_attention_heads=32"),
        (("llama-3.1-8b", "--tp", "8", "--dcp", "3"), "dcp=3: expected a divisor of tp=8"),
        (("llama-3.1-8b", "--tp", "8", "--dcp", "2"), "dcp=2: expected at least 2 ranks per head"),
        (("llama-3.1-8b", "--pcp", "2", "--dcp", "4"), "dcp=4: expected 1, pcp=2"),
        (("llama-3.1-8b", "--pcp", "1000000000"), "tp x pcp x pp=1000000000: expected at most"),
        (("llama-3.1-8b", "--dp", "0"), "dp=0: expected a whole number of at least 1"),
        (("llama-3.1-8b", "--pp", "64"), "pp=64: expected at most num_hidden_layers=32"),
        (("llama-3.1-8b", "--block-size", "0"), "block_size=0: expected a whole number"),
        (("llama-3.1-8b", "--kv-cache-dtype", "fp4"), "kv_cache_dtype='fp4': expected one of auto"),
        (("llama-3.1-8b", "--blocks-per-chunk", "0"), "blocks_per_chunk=0"),
        (("llama-3.1-8b", "--host", "lots"), "--host='lots': expected a size such as"),
        (("llama-3.1-8b", "--disk", "-1"), "--disk='-1': expected a size such as"),
        (("llama-3.1-8b", "--sequence-tokens", "0"), "--sequence-tokens=0"),
        (("llama-3.1-8b", "--explain", "32"), "--explain='32': expected a layer's number or name"),
        (("llama-3.1-8b", "--compare", "xp=2"), "--compare='xp=2': expected settings such as tp=4"),
        (("llama-3.1-8b", "--compare", "tp=2,tp=4"), "--compare='tp=2,tp=4'"),
        (("llama-3.1-8b", "--compare", "tp="), "--compare='tp='"),
        (("llama-3.1-8b", "--compare", "tp=two"), "--compare tp='two': expected a whole number"),
        (("gpt-oss-120b", "--tp", "16"), "tp=16: expected at most num_key_value_heads=8: gpt-oss"),
    ],
)
def test_every_way_to_fail_names_the_field(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (EXIT_USAGE, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_help_has_examples_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    from kvfold.cli.plan import EXAMPLES

    lines = [line for line in EXAMPLES.splitlines() if line.startswith("kvfold plan")]
    assert len(lines) >= 4
    _, out, _ = run(capsys, "--help")
    for line in lines:
        assert line in " ".join(out.split())
        words = shlex.split(line.partition(" |")[0])[2:]
        if not words[0].startswith("~"):
            assert run(capsys, *words)[0] == 0


def test_the_command_imports_no_torch_no_numpy_and_no_engine() -> None:
    code = (
        "import sys; from kvfold.cli import main; assert main(['plan', 'kimi-k3']) == 0; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'vllm', 'rich')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr.decode()
