"""What nnU-Net finds here by name: see `segcal.adapters.nnunet`."""

from segcal.adapters.nnunet import nnUNetTrainerHardACE, nnUNetTrainerSoftACE

__all__ = ["nnUNetTrainerHardACE", "nnUNetTrainerSoftACE"]
