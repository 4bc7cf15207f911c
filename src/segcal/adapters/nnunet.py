"""Trainers for nnU-Net v2 that add the average calibration error (ACE) to nnU-Net's own loss.

nnU-Net finds trainers by their names, in its own package and in the folders of the environment variable
`nnUNet_extTrainer`. `python -m segcal.adapters.nnunet` prints the folder that has ours:

    export nnUNet_extTrainer="$(python -m segcal.adapters.nnunet)"
    nnUNetv2_train 4 3d_fullres 0 -tr nnUNetTrainerSoftACE

Dice and cross-entropy stay nnU-Net's, and so do data, network and schedule: a trainer here differs from
`nnUNetTrainer` by the calibration term alone, which is added at every scale of the deep supervision. A variant is a
subclass of two lines, in a folder of one's own that `nnUNet_extTrainer` names as well:

    class nnUNetTrainerSoftACELight(nnUNetTrainerSoftACE):
        ace_weight = 0.3

For a quick try the environment has the last word: SEGCAL_ACE_WEIGHT, SEGCAL_ACE_BINS, SEGCAL_DICE_WEIGHT and
SEGCAL_CE_WEIGHT.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import Tensor, nn

from segcal.binning import MOST_BINS, Binning, Kernel
from segcal.errors import ConfigError
from segcal.losses import ACELoss

TRAINERS = Path(__file__).resolve().parent / "nnunet_trainers"
"""The folder for `nnUNet_extTrainer`. nnU-Net imports every module in it by its bare name, so it holds nothing else."""


class PlusACE(nn.Module):
    """nnU-Net's loss at one scale plus a weight times the average calibration error, called as nnU-Net calls it.

    Labels are nnU-Net's: an integer map (case, 1, ...); or of regions a channel each, and one more for voxels to ignore
    where there is `ignore_channel`.
    """

    def __init__(self, own: nn.Module, calibration: ACELoss, weight: float, *, ignore_channel: bool) -> None:
        super().__init__()
        self.own, self.calibration, self.weight, self.ignore_channel = own, calibration, weight, ignore_channel

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        own, mask = self.own(logits, labels), None
        if self.ignore_channel:
            labels, mask = labels[:, :-1], labels[:, -1:] == 0
        total: Tensor = own + self.weight * self.calibration(logits, labels, mask=mask)
        return total

    def extra_repr(self) -> str:
        """What nnU-Net's debug.json says of the term."""
        return f"weight={self.weight:g}, {self.calibration.binning}, ignore_channel={self.ignore_channel}"


class nnUNetTrainerHardACE(nnUNetTrainer):  # noqa: N801
    """nnU-Net's trainer with hard-binned ACE in its loss; the class attributes are the settings.

    It may stand before another trainer that leaves the loss as it is, as nnUNetTrainer_100epochs, in the bases of a
    variant. Once the loss is built, the attributes hold what it was built with.
    """

    ace_weight: float = 1.0
    bins: int = 20
    kernel: Kernel = "hard"
    dice_weight: float = 1.0
    ce_weight: float = 1.0

    def _build_loss(self) -> nn.Module:
        self._read_settings()
        loss = super()._build_loss()
        deep = isinstance(loss, DeepSupervisionWrapper)
        own = loss.loss if deep else loss
        total = self._with_calibration(own)
        self.print_to_log_file(
            f"segcal: loss = {type(own).__name__}(dice_weight={self.dice_weight:g}, ce_weight={self.ce_weight:g}) "
            f"+ {self.ace_weight:g} * ACE({self.kernel}, {self.bins} bins)"
        )
        if not deep:
            return total
        loss.loss = total
        wrapper: nn.Module = loss
        return wrapper

    def _read_settings(self) -> None:
        """Take settings from the environment, where it has them, and refuse wrong ones."""
        for name in _VARIABLES:
            setattr(self, name, _setting(name, getattr(self, name)))
        if not (self.dice_weight or self.ce_weight or self.ace_weight):
            raise ConfigError("one of dice_weight, ce_weight and ace_weight must be above 0; all of them are 0.")

    def _with_calibration(self, own: nn.Module) -> nn.Module:
        """nnU-Net's loss of one scale, with the weights of this trainer and its calibration term."""
        for name, attribute in (("dice_weight", "weight_dice"), ("ce_weight", "weight_ce")):
            weight = getattr(self, name)
            if weight != 1:
                if not hasattr(own, attribute):
                    raise ConfigError(f"{name} must be 1 for {type(own).__name__}, which has none; got {weight:g}.")
                setattr(own, attribute, weight)
        if not self.ace_weight:
            return own
        labels = self.label_manager
        calibration = ACELoss(
            Binning(self.bins, kernel=self.kernel),
            activation="sigmoid" if labels.has_regions else "softmax",
            ignore_index=None if labels.has_regions else labels.ignore_label,
        )
        ignore_channel = labels.has_regions and labels.has_ignore_label
        return PlusACE(own, calibration, self.ace_weight, ignore_channel=ignore_channel)


class nnUNetTrainerSoftACE(nnUNetTrainerHardACE):  # noqa: N801
    """nnU-Net's trainer with soft-binned ACE in its loss."""

    kernel: Kernel = "triangular"


_VARIABLES = {
    "dice_weight": "SEGCAL_DICE_WEIGHT",
    "ce_weight": "SEGCAL_CE_WEIGHT",
    "ace_weight": "SEGCAL_ACE_WEIGHT",
    "bins": "SEGCAL_ACE_BINS",
}


def _setting(name: str, own: float) -> float:
    """What the variable of a setting says, or else the trainer's own value."""
    text = os.environ.get(_VARIABLES[name])
    whole = name == "bins"
    try:
        value = own if text is None else int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if not (1 <= value <= MOST_BINS if whole else 0 <= value < math.inf):
        where, came = (name, own) if text is None else (_VARIABLES[name], text)
        must = f"a whole number from 1 to {MOST_BINS}" if whole else "a number of at least 0"
        raise ConfigError(f"{where} must be {must}; got {came!r}.")
    return value


if __name__ == "__main__":
    print(TRAINERS)
