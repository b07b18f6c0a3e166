"""A vision transformer of 12 layers, 768 wide, like ViT-B/16: 64 images at once, and one image."""

import torch
from transformers import ViTConfig, ViTForImageClassification

SHAPES = [{"name": "batch", "args": {"images": 64}}, {"name": "single", "args": {"images": 1}}]
SIZES = {"num_labels": 1000, "image_size": 224}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = ViTForImageClassification(ViTConfig(**SIZES)).eval()

    def forward(self, pixels):
        return self.model(pixels).logits


def get_inputs(images):
    return [torch.randn(images, 3, SIZES["image_size"], SIZES["image_size"])]
