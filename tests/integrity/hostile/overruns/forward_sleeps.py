"""Sleeps in ``forward`` when it is called for the third time: ``reference_timeout``."""


class Model(torch.nn.Module):
    calls = 0

    def forward(self, x):
        Model.calls += 1
        if Model.calls == 3:
            time.sleep(1000)
        return x * 2 + 1
