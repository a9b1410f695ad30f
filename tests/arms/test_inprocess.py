import pytest

from arms.inprocess import decoder_config
from arms.spec import parse_arm
from lumotree.engine import DecoderConfig


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        ("ar", DecoderConfig("root", 0, False)),
        ("mtp-1", DecoderConfig("chain-1", 1, False)),
        ("mtp-7", DecoderConfig("chain-7", 7, False)),
        ("lumotree", DecoderConfig("hydra27", 5, True)),
        ("lumotree:tree=chain-3,passes=3,suffix=off", DecoderConfig("chain-3", 3, False)),
        ("lumotree:tree=-1,0,0,1", DecoderConfig("-1,0,0,1", 5, True)),
    ],
)
def test_a_spec_is_one_decoder_config(spec, config):
    assert decoder_config(parse_arm(spec)) == config
